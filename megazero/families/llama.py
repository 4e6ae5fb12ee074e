"""Llama, and the models of transformers that are a Llama with other options: Helium, GLM."""

from megazero.families.parts.family import Family, Published
from megazero.families.parts.relatives import GLM_ROW, LLAMA, SMALL_GROUPS, SMALL_SCALING, llama_row
from megazero.families.parts.rope_scaling import PARTIAL_ROTARY, ROTARY
from megazero.families.parts.tensor_names import BEFORE, GLM
from megazero.families.parts.weight_conversions import HEAD_DIM, USUAL_HEAD_DIM

LLAMA_2 = {"norm_epsilon": 1e-5}
LLAMA_3 = LLAMA_2 | {"rotary_base": 5e5, "rope_scaling_factor": 8}
TIED = LLAMA_2 | {"untie_embeddings": False}
FAMILY = Family(
    "llama",
    LLAMA,
    (
        llama_row("llama", "LlamaForCausalLM", ROTARY, HEAD_DIM),
        llama_row(
            "helium",
            "HeliumForCausalLM",
            *(ROTARY, USUAL_HEAD_DIM),
            needed={"rotary_interleaved": True},
            kinds="G",
        ),
        llama_row("glm", "GlmForCausalLM", PARTIAL_ROTARY, HEAD_DIM, layers=BEFORE | GLM, **GLM_ROW),
    ),
    published={
        "llama-125m": Published(0, (12, 768, 12, 2048, 4, 32000, 2048)),
        "llama-1b": Published(0, (20, 2048, 32, 5632, 4, 32000, 2048)),
        "llama-7b": Published(6_738_415_616, (32, 4096, 32, 11008, 32, 32000, 4096), LLAMA_2),
        "llama-70b": Published(68_976_648_192, (80, 8192, 64, 28672, 8, 32000, 4096), LLAMA_2),
        "llama-3.2-1b": Published(
            1_235_814_400, (16, 2048, 32, 8192, 8, 128256, 8192), LLAMA_3 | TIED | {"rope_scaling_factor": 32}
        ),
        "llama-3.1-8b": Published(8_030_261_248, (32, 4096, 32, 14336, 8, 128256, 8192), LLAMA_3),
        "llama-3.1-70b": Published(70_553_706_496, (80, 8192, 64, 28672, 8, 128256, 8192), LLAMA_3),
        "llama-3.1-8b-128k": Published(8_030_261_248, (32, 4096, 32, 14336, 8, 128256, 2**17), LLAMA_3),
        "llama-3.1-8b-1m": Published(
            8_030_261_248, (32, 4096, 32, 14336, 8, 128256, 2**20), LLAMA_3 | {"rope_scaling_factor": 128}
        ),
        "smollm2-135m": Published(134_515_008, (30, 576, 9, 1536, 3, 49152, 2048), TIED | {"rotary_base": 1e5}),
        "smollm2-1.7b": Published(1_711_376_384, (24, 2048, 32, 8192, 32, 49152, 2048), TIED | {"rotary_base": 1.3e5}),
    },
    small=SMALL_GROUPS | SMALL_SCALING | {"untie_embeddings": True, "rotary_base": 5e3},
    place=2,
)
