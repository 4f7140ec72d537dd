"""The catalogue as text: what every built-in part must say about itself, and to which deployments it applies."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from hotpass.domain import Domain
from hotpass.errors import InputError
from hotpass.parts import declaration
from hotpass.records.candidate import Numerics, PartSource
from hotpass.records.deployment import Deployment, HardwareRef, ModelRef, Serving, TrafficRef
from hotpass.records.shapes import Phase, ShapeRow, ShapeTable
from search.catalogue import FAMILIES, applicable, find_part, load_catalogue

PARTS = load_catalogue()

SLOTS = {
    "model": "",
    "model.layers.*": "LlamaDecoderLayer",
    "model.layers.*.self_attn": "LlamaAttention",
    "model.layers.*.mlp": "LlamaMLP",
    "model.layers.*.input_layernorm": "LlamaRMSNorm",
    "model.layers.*.post_attention_layernorm": "LlamaRMSNorm",
    "model.norm": "LlamaRMSNorm",
    "lm_head": "Linear",
    "model.layers.*.self_attn.q_proj": "Linear",
    "model.layers.*.self_attn.k_proj": "Linear",
    "model.layers.*.self_attn.v_proj": "Linear",
    "model.layers.*.self_attn.o_proj": "Linear",
    "model.layers.*.mlp.gate_proj": "Linear",
    "model.layers.*.mlp.up_proj": "Linear",
    "model.layers.*.mlp.down_proj": "Linear",
}
"""What a built-in part may claim, and the class that stands there in a Llama tree."""

VLLM_SLOTS = {
    "model.layers.*.input_layernorm": "RMSNorm",
    "model.layers.*.post_attention_layernorm": "RMSNorm",
    "model.norm": "RMSNorm",
    "model.layers.*.mlp": "LlamaMLP",
    "model.layers.*.mlp.act_fn": "SiluAndMul",
}
"""The same in vLLM's tree; that these are its names is tested on a live one."""

NARROWED = ("bf16", "bfloat16", "int8", "fp16", "float16")
"""Parameter values that store weights narrower than float32: lossy on a float32 model, or the part must say why not."""


def deployment(**model: object) -> Deployment:
    ref = ModelRef(
        name="tiny", folder="/nowhere", architecture="LlamaForCausalLM", dtype="float32", num_layers=2, layers=None, num_heads=4,
        num_kv_heads=2, head_dim=16, hidden_size=64, intermediate_size=128, vocab_size=256, max_context=512, num_params=1,
        packed_formats=(), config_hash="c", weights_hash="w", tokenizer_hash="t",
    )  # fmt: skip
    hardware = HardwareRef(
        name="cpu:test", device="cpu", num_devices=2, isa=("avx2", "fma"), last_level_cache_bytes=1, memory_bytes=1
    )
    traffic = TrafficRef(
        name="chat", source_format="preset", content_hash="x", num_requests=1, dropped={}, content_valid=False
    )
    row = ShapeRow(
        phase=Phase.DECODE, num_seqs=1, query_tokens=1, context_mean=8, context_max=8, steps_share=1.0, tokens_share=1.0
    )
    shapes = ShapeTable(rows=(row,), concurrency=1, chunk_tokens=512, num_steps=1, output_tokens_per_step=1.0)
    return Deployment(
        model=replace(ref, **model), traffic=traffic, hardware=hardware, serving=Serving(), concurrency=1, shapes=shapes
    )  # type: ignore[arg-type]


def written(arguments: str) -> PartSource:
    text = f"from hotpass import part\n@part(engine='decoder', claims=['model'], {arguments})\nclass P:\n    def forward(self): ...\n"
    return PartSource(name="p", files=(("part.py", text),))


@pytest.mark.parametrize("source", PARTS, ids=lambda source: source.name)
def test_every_part_says_what_it_is(source: PartSource) -> None:
    declared = declaration(source)
    sentences = declared.summary.replace("\n", " ").count(". ") + declared.summary.endswith(".")
    assert sentences >= 2, "the docstring is a paragraph: why it should help, and where it will not"
    assert len(declared.summary) >= 200
    assert declared.engine in ("decoder", "module", "vllm")
    for claim in declared.claims if declared.engine == "vllm" else ():
        assert declared.replaces == VLLM_SLOTS[claim], "`replaces` names vLLM's class at the claimed slot"
    for claim in declared.claims if declared.engine == "decoder" else ():
        assert claim in SLOTS, f"{claim} is no slot of a Llama tree"
        assert declared.replaces == SLOTS[claim], "`replaces` names the class at the claimed slot"
    for claim in declared.claims if declared.engine == "module" else ():
        assert (claim == "model") == (declared.replaces == ""), "a part for any tree claims all of it, or a class in it"
    assert declared.keeps == () or declared.claims != ("model",)
    for condition, kind in declared.numerics_when.items():
        for term in condition.split(","):
            name, _, value = term.strip().partition("=")
            known = {str(item) for item in declared.params.get(name, ())} | (
                {"float32", "bfloat16", "float16"} if name == "dtype" else set()
            )
            assert value in known, f"{condition} can never hold"
        assert kind in list(Numerics)
    assert declared.bind(source).params == declared.defaults()
    applicable(source, deployment(), compiler=True)


@pytest.mark.parametrize("source", PARTS, ids=lambda source: source.name)
def test_storage_narrower_than_the_model_is_declared_lossy(source: PartSource) -> None:
    declared = declaration(source)
    for name, values in declared.params.items():
        for value in values:
            if value in NARROWED:
                bound = declared.defaults() | {name: value}
                assert declared.numerics_of(bound, "float32") is Numerics.LOSSY, (
                    f"{name}={value} narrows a float32 model"
                )


def test_names_are_unique_and_sorted() -> None:
    names = [source.name for source in PARTS]
    assert names == sorted(set(names))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_device_gets_its_parts_and_those_for_any(device: str) -> None:
    wanted = [source.name for source in PARTS if declaration(source).device in (device, "any")]
    assert [source.name for source in load_catalogue(device)] == wanted


def test_unknown_device_and_name_are_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match="cuda"):
        load_catalogue("cdua")
    first = PARTS[0].name
    with pytest.raises(InputError, match=f"did you mean '{first}'"):
        find_part(first + "x")


def test_find_part_returns_the_same_text() -> None:
    assert all(find_part(source.name).sha256 == source.sha256 for source in PARTS)


@pytest.mark.parametrize(
    ("arguments", "model", "compiler", "reason"),
    [
        ("device='cuda'", {}, True, "needs device cuda"),
        ("requires=['packed:Q4_1']", {}, True, "the model has none"),
        ("requires=['packed:Q4_1']", {"packed_formats": ("Q8_0",)}, True, "the model has Q8_0"),
        ("requires=['packed:Q4_1']", {"packed_formats": ("Q4_1", "Q8_0")}, True, None),
        ("requires=['packed']", {}, True, "needs packed GGUF"),
        ("requires=['packed']", {"packed_formats": ("Q8_0",)}, True, None),
        ("requires=['isa:avx2']", {}, True, None),
        ("requires=['isa:amx_bf16']", {}, True, "needs amx_bf16"),
        ("requires=['compiler']", {}, False, "needs a C++ compiler"),
        ("requires=['compiler']", {}, True, None),
        ("requires=['family:llama']", {}, True, None),
        ("requires=['family:llama']", {"architecture": "GPT2LMHeadModel"}, True, "is for the llama family"),
        ("requires=['compiler', 'isa:avx2']", {}, False, "needs a C++ compiler"),
    ],
)
def test_applicable(arguments: str, model: dict[str, object], compiler: bool, reason: str | None) -> None:
    said = applicable(written(arguments), deployment(**model), compiler=compiler)
    assert said is None if reason is None else (said is not None and reason in said)


@pytest.mark.parametrize(
    ("replaces", "architecture", "applies"),
    [
        ("LlamaMLP", "LlamaForCausalLM", True),
        ("LlamaMLP", "Qwen3ForCausalLM", False),
        ("GemmaMLP", "GemmaForCausalLM", True),
        ("Gemma2MLP", "GemmaForCausalLM", False),
        ("Linear", "GPT2LMHeadModel", True),
        ("", "GPT2LMHeadModel", True),
    ],
)
def test_a_part_for_another_models_class_does_not_apply(replaces: str, architecture: str, applies: bool) -> None:
    said = applicable(written(f"replaces={replaces!r}"), deployment(architecture=architecture), compiler=True)
    assert (said is None) == applies


def test_an_unknown_requirement_is_refused() -> None:
    with pytest.raises(InputError, match="did you mean 'packed:Q4_1'"):
        applicable(written("requires=['pakced:Q4_1']"), deployment(), compiler=True)


def test_domains_parse_and_families_are_architectures() -> None:
    for source in PARTS:
        Domain.parse(declaration(source).domain)
    assert all(name.endswith("ForCausalLM") for names in FAMILIES.values() for name in names)


def test_reading_the_catalogue_imports_no_torch() -> None:
    code = (
        "import sys, search.catalogue as c; c.load_catalogue(); print('torch' in sys.modules, 'triton' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_parts_for_modules_are_for_modules_only() -> None:
    served = replace(deployment(), serving=Serving(engine="module"))
    for source in PARTS:
        reason = applicable(source, served, compiler=True) or ""
        assert reason.startswith("is for the decoder engine") == (declaration(source).engine == "decoder")
    assert applicable(find_part("silero-frames"), served, compiler=True) == (
        "is for SileroVAD, the module is a LlamaForCausalLM"
    )
