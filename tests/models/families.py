"""Model families as people bring them: small, with random weights, from the libraries' own code.

Each model gives a loss, as its training loop would see it: Hugging Face's models theirs, a plain
stack of layers the mean square of its output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN, HEADS, KV_HEADS, INNER, LAYERS, VOCABULARY = 48, 6, 2, 80, 2, 96
HEAD_DIM = HIDDEN // HEADS
POSITIONS = 128
IMAGE, PATCH, CLASSES = 16, 4, 7


@dataclass(frozen=True)
class Family:
    """One kind of model.

    Attributes:
        build: makes one, given an attention implementation ("sdpa" or "eager") and the number of
            layers.
        inputs: its keyword arguments for a batch size and a sequence length.
        attentions: the implementations that it knows.
    """

    build: Callable[[str, int], nn.Module]
    inputs: Callable[[int, int], dict[str, Tensor]]
    attentions: tuple[str, ...] = ("sdpa", "eager")


def build(
    name: str, attention: str, dtype: torch.dtype, layers: int = LAYERS, seed: int = 0
) -> nn.Module:
    """A model of the family ``name`` for training, without dropout.

    Norm weights and biases are random too: ones and zeros hide mistakes.
    """
    torch.manual_seed(seed)
    model = FAMILIES[name].build(attention, layers).to(dtype).train()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            with torch.no_grad():
                parameter += 0.3 * torch.randn_like(parameter)
    return model


def loss_of(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """The scalar that ``model`` is trained on."""
    out = model(**inputs)
    return out if isinstance(out, Tensor) else out.loss


# --- Hugging Face transformers


def decoder(
    model: str,
    config: str | None = None,
    attentions: tuple[str, ...] = ("sdpa", "eager"),
    **settings,
) -> Family:
    """A causal language model of the Llama kind, by the name of its classes."""

    def build(attention: str, layers: int) -> nn.Module:
        import transformers

        return getattr(transformers, f"{model}ForCausalLM")(
            getattr(transformers, config or f"{model}Config")(
                hidden_size=HIDDEN,
                intermediate_size=INNER,
                num_hidden_layers=layers,
                num_attention_heads=HEADS,
                num_key_value_heads=KV_HEADS,
                head_dim=HEAD_DIM,
                vocab_size=VOCABULARY,
                max_position_embeddings=POSITIONS,
                pad_token_id=0,
                bos_token_id=0,
                eos_token_id=0,
                use_cache=False,
                attn_implementation=attention,
                **settings,
            )
        )

    return Family(build, tokens, attentions)


def tokens(batch: int, seq: int) -> dict[str, Tensor]:
    ids = torch.randint(1, VOCABULARY, (batch, seq))
    return {"input_ids": ids, "labels": ids}


def gpt2(attention: str, layers: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=HIDDEN,
        n_inner=INNER,
        n_layer=layers,
        n_head=HEADS,
        vocab_size=VOCABULARY,
        n_positions=POSITIONS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        attn_implementation=attention,
    )
    return GPT2LMHeadModel(config)


def encoder_settings(attention: str, layers: int) -> dict:
    return dict(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation=attention,
    )


def bert(attention: str, layers: int) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=POSITIONS,
        **encoder_settings(attention, layers),
    )
    return BertForMaskedLM(config)


def vit(attention: str, layers: int) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=IMAGE,
        patch_size=PATCH,
        num_labels=CLASSES,
        problem_type="single_label_classification",
        **encoder_settings(attention, layers),
    )
    return ViTForImageClassification(config)


def images(batch: int, seq: int) -> dict[str, Tensor]:
    """``seq`` has no say: (IMAGE / PATCH)² patches and the class token."""
    return {
        "pixel_values": torch.randn(batch, 3, IMAGE, IMAGE),
        "labels": torch.randint(CLASSES, (batch,)),
    }


# --- torch.nn, and a block in the style of torchtitan's models


class Stack(nn.Module):
    """Layers, and the mean square of what they give."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def activations(batch: int, seq: int) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, seq, HIDDEN)}


def encoder(norm_first: bool) -> Family:
    def build(attention: str, layers: int) -> nn.Module:
        layers = (
            nn.TransformerEncoderLayer(
                HIDDEN, HEADS, INNER, 0.0, F.gelu, batch_first=True, norm_first=norm_first
            )
            for _ in range(layers)
        )
        return Stack(*layers)

    return Family(build, activations, ("sdpa",))


class TitanBlock(nn.Module):
    """nn.RMSNorm, complex-valued RoPE, grouped-query SDPA without repetition of the heads, and
    SwiGLU of w1, w2 and w3."""

    def __init__(self):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.wq = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.wk = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.wv = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.wo = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.w1 = nn.Linear(HIDDEN, INNER, bias=False)
        self.w2 = nn.Linear(INNER, HIDDEN, bias=False)
        self.w3 = nn.Linear(HIDDEN, INNER, bias=False)
        frequencies = 1e4 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = torch.outer(torch.arange(POSITIONS), frequencies)
        self.register_buffer("rotations", torch.stack([angles.cos(), angles.sin()], -1), False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        n = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(n)) * self.w3(n))

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, HEAD_DIM)) for w in (self.wq, self.wk, self.wv))
        q, k, v = (t.transpose(1, 2) for t in (self.rotated(q), self.rotated(k), v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(2))

    def rotated(self, z: Tensor) -> Tensor:
        """[B, S, heads, D], neighbouring elements as real and imaginary part."""
        wide = torch.view_as_complex(z.float().unflatten(-1, (-1, 2)))
        turns = torch.view_as_complex(self.rotations.float()[: z.shape[1], None])
        return torch.view_as_real(wide * turns).flatten(-2).to(z.dtype)


def titan(attention: str, layers: int) -> nn.Module:
    return Stack(*(TitanBlock() for _ in range(layers)))


FAMILIES = {
    "Llama": decoder("Llama"),
    "Mistral": decoder("Mistral", sliding_window=8),
    "Qwen2": decoder("Qwen2"),
    "Qwen3": decoder("Qwen3"),
    "Gemma 2": decoder("Gemma2", attentions=("eager",), sliding_window=8),
    "Gemma 3": decoder("Gemma3", "Gemma3TextConfig", sliding_window=8),
    "Phi-3": decoder("Phi3"),
    "GPT-2": Family(gpt2, tokens),
    "BERT": Family(bert, tokens),
    "ViT": Family(vit, images),
    "nn.TransformerEncoderLayer": encoder(norm_first=False),
    "nn.TransformerEncoderLayer (norm first)": encoder(norm_first=True),
    "torchtitan-style block": Family(titan, activations, ("sdpa",)),
}

CONFIGURATIONS = [(name, family.attentions[0], "float32") for name, family in FAMILIES.items()] + [
    (name, attention, "bfloat16")
    for name, family in FAMILIES.items()
    for attention in family.attentions
]
"""Model, attention and dtype of what is tested. In float32 no fusion is of eager attention."""
