"""Tiny models of many architectures, each with something that can be run: name -> () -> (model, call)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Call = Callable[[], Tensor]
IDS = torch.tensor([[1, 5, 3, 2], [4, 4, 6, 7]])
SMALL = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
VISION = {k: v for k, v in SMALL.items() if k != "vocab_size"} | {"image_size": 8, "patch_size": 4}


def llama(**more: Any) -> tuple[nn.Module, Call]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{**SMALL, "num_key_value_heads": 1, "attn_implementation": "eager", **more})
    model = LlamaForCausalLM(config)
    return model, lambda: model(input_ids=IDS, labels=IDS).loss


def peft_llama() -> tuple[nn.Module, Call]:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(llama()[0], LoraConfig(r=2, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM"))
    return model, lambda: model(input_ids=IDS, labels=IDS).loss


def gpt2() -> tuple[nn.Module, Call]:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=24, n_embd=16, n_layer=3, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=2)
    )
    return model, lambda: model(input_ids=IDS, labels=IDS).loss


def t5() -> tuple[nn.Module, Call]:
    from transformers import T5Config, T5ForConditionalGeneration

    shape = {"vocab_size": 24, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    config = T5Config(**shape, decoder_start_token_id=0, dropout_rate=0.0, tie_word_embeddings=True)
    model = T5ForConditionalGeneration(config)
    return model, lambda: model(input_ids=IDS, labels=IDS).loss


def vit() -> tuple[nn.Module, Call]:
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(**VISION, num_labels=3))
    pixels = torch.linspace(-1, 1, 2 * 3 * 64).view(2, 3, 8, 8)
    return model, lambda: model(pixel_values=pixels, labels=torch.tensor([0, 2])).loss


def clip() -> tuple[nn.Module, Call]:
    from transformers import CLIPConfig, CLIPModel

    text = {**SMALL, "max_position_embeddings": 8, "projection_dim": 8, "eos_token_id": 7, "bos_token_id": 1}
    vision = {k: v for k, v in SMALL.items() if k != "vocab_size"} | {
        "image_size": 8,
        "patch_size": 4,
        "projection_dim": 8,
    }
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))
    pixels = torch.linspace(-1, 1, 2 * 3 * 64).view(2, 3, 8, 8)
    return model, lambda: model(input_ids=IDS, pixel_values=pixels, return_loss=True).loss


def bert() -> tuple[nn.Module, Call]:
    from transformers import BertConfig, BertForMaskedLM

    model = BertForMaskedLM(BertConfig(**SMALL, max_position_embeddings=8))
    return model, lambda: model(input_ids=IDS, labels=IDS).loss


def albert() -> tuple[nn.Module, Call]:
    from transformers import AlbertConfig, AlbertForMaskedLM

    model = AlbertForMaskedLM(AlbertConfig(**SMALL, embedding_size=8, num_hidden_groups=1, max_position_embeddings=8))
    return model, lambda: model(input_ids=IDS, labels=IDS).loss


def sequential() -> tuple[nn.Module, Call]:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    return model, lambda: model(torch.ones(3, 4)).square().mean()


def transformer() -> tuple[nn.Module, Call]:
    model = nn.Transformer(8, 2, 2, 2, 16, dropout=0.0, batch_first=True)
    x = torch.linspace(-1, 1, 64).view(2, 4, 8)
    return model, lambda: model(x, x.flip(1)).square().mean()


def linear() -> tuple[nn.Module, Call]:
    model = nn.Linear(4, 2)
    return model, lambda: model(torch.ones(3, 4)).square().mean()


class _PairsInLists(nn.Module):
    """Blocks that are never called themselves: `for attention, mlp in self.layers`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)
        self.layers = nn.ModuleList([nn.ModuleList([nn.Linear(8, 8), nn.LayerNorm(8)]) for _ in range(3)])
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        for mix, norm in self.layers:
            x = x + mix(norm(x))
        return self.head(x)


def pairs_in_lists() -> tuple[nn.Module, Call]:
    model = _PairsInLists()
    return model, lambda: model(torch.ones(3, 4)).square().mean()


class _OneBlockTwice(nn.Module):
    """The same module at two places of one list, and a parameter of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        shared = nn.Linear(4, 4)
        self.layers = nn.ModuleList([shared, nn.Linear(4, 4), shared])

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def one_block_twice() -> tuple[nn.Module, Call]:
    model = _OneBlockTwice()
    return model, lambda: model(torch.ones(3, 4)).square().mean()


MAKERS: dict[str, Callable[[], tuple[nn.Module, Call]]] = {
    f.__name__: f
    for f in (
        llama, peft_llama, gpt2, t5, vit, clip, bert, albert, sequential, transformer, linear, pairs_in_lists,
        one_block_twice,
    )
}  # fmt: skip


def made(name: str) -> tuple[nn.Module, Call]:
    """Always with the same weights, and without dropout."""
    torch.manual_seed(0)
    model, call = MAKERS[name]()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model, call
