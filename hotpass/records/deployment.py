"""A deployment: model + traffic + hardware + what serves it today. Each piece is identified by a hash of its content."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hotpass.canonical import content_hash
from hotpass.records.shapes import ShapeTable


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRef:
    """A prepared model on disk. Made by `engines.prepare`."""

    name: str
    """As the user gave it: an alias, a hub id, a folder or a GGUF file; a cut adds `@layers=0,1,2`."""
    folder: str
    """The prepared folder (config.json, tokenizer, model.safetensors, perhaps packed.safetensors)."""
    architecture: str
    """`architectures[0]` of config.json, as `LlamaForCausalLM`."""
    dtype: str
    """The declared dtype of the values, `float32` or `bfloat16` or `float16`: what narrowing is relative to."""
    num_layers: int
    """Decoder layers of this model; of a cut, those kept."""
    layers: tuple[int, ...] | None
    """Layer indices kept by a cut, in order; None for the whole model."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_context: int
    """Longest context in tokens that the configuration allows."""
    num_params: int
    """Parameters of this model (a tied head counted once)."""
    packed_formats: tuple[str, ...]
    """GGUF block formats kept in packed.safetensors, as `("Q4_1", "Q8_0")`; empty when there are none."""
    config_hash: str
    weights_hash: str
    """SHA-256 over the weights file (and the packed file); of a cut, of that and the layers."""
    tokenizer_hash: str

    @property
    def id(self) -> str:
        return content_hash([self.config_hash, self.weights_hash, self.tokenizer_hash, self.dtype, self.layers])


@dataclass(frozen=True, kw_only=True, slots=True)
class TrafficRef:
    """Where traffic came from and what of it is used. Made by `hotpass.traffic`."""

    name: str
    """A preset's name or a file name."""
    source_format: str
    """`mooncake`, `azure`, `burstgpt`, `openai-log` or `preset`; `examples` of a module, whose example inputs stand for traffic."""
    content_hash: str
    num_requests: int
    """Requests used."""
    dropped: Mapping[str, int]
    """Requests not used, by reason (`beyond-context`, `no-output`, …); never clipped."""
    content_valid: bool
    """True when the text is the traffic's own; False when lengths were filled with corpus text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareRef:
    """The machine, as identity: what must be equal for two measurements to be comparable. Made by `engines.probe`."""

    name: str
    """As `cpu:Intel(R) Xeon(R) Processor` or `h200-sxm`."""
    device: str
    """`cpu` or `cuda`."""
    num_devices: int
    """Physical cores usable by this process on a CPU; GPUs otherwise."""
    isa: tuple[str, ...]
    """Instruction-set features that kernels care about, sorted, as `("avx2", "avx512f", "fma")`; empty on a GPU."""
    last_level_cache_bytes: int
    memory_bytes: int
    details: Mapping[str, str | int | float] = field(default_factory=dict)
    """Measured or published figures, units in names (`read_gb_per_s`, `cache_read_gb_per_s`, `fp32_gflop_per_s`)."""

    @property
    def id(self) -> str:
        """Hash of what does not vary between two runs on one machine (measured figures are left out)."""
        return content_hash([self.name, self.device, self.num_devices, self.isa, self.last_level_cache_bytes])


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """What serves the deployment today: the denominator of `speedup_vs_loaded`."""

    engine: str = "transformers"
    version: str = ""
    arguments: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)
    """Every effective argument (attention implementation, threads, dtype, compile mode, …)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployment:
    """One model under one traffic on one machine, as served today."""

    model: ModelRef
    traffic: TrafficRef
    hardware: HardwareRef
    serving: Serving
    concurrency: int
    """Clients of the closed loop that the shape table was counted at."""
    shapes: ShapeTable

    @property
    def id(self) -> str:
        return content_hash(
            [
                self.model.id,
                self.traffic.content_hash,
                self.hardware.id,
                self.serving,
                self.concurrency,
                self.shapes,
            ]
        )
