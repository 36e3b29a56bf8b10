"""Granite: Llama with constants on embeddings, attention, what blocks add, and logits.

A block adds m · f(norm(h)) to the stream h. The stream held here is h / m: blocks then add f alone, and
the norms, which take no notice of the size of their input but for epsilon, see the same with eps / m².
"""

from __future__ import annotations

from delivery.model.config import ModelConfig
from delivery.model.families import naming, reading
from delivery.model.families.family import Family, HfConfig


def config(hf: HfConfig) -> ModelConfig:
    added = reading.number(hf, "residual_multiplier", 1.0)
    return reading.decoder(
        hf,
        "granite",
        rms_eps=reading.number(hf, "rms_norm_eps", 1e-6) / added**2,
        embedding_scale=reading.number(hf, "embedding_multiplier", 1.0) / added,
        attention_scale=reading.number(hf, "attention_multiplier", 1.0),
        logit_scale=1.0 / reading.number(hf, "logits_scaling", 1.0),
    )


FAMILY = Family(
    name="granite",
    architectures=("GraniteForCausalLM",),
    config=config,
    linears=naming.linears,
    norms=naming.norms,
)
