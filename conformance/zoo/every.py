"""All faults, in a fixed order."""

from __future__ import annotations

from functools import cache

from . import (
    encoding_faults,
    gradient_faults,
    layer_faults,
    mask_faults,
    memory_faults,
    model_faults,
    output_faults,
    precision_faults,
    random_faults,
    rotary_faults,
    rounding_faults,
    score_faults,
    training_faults,
    visibility_faults,
)
from .faults import STRENGTHS, Fault

GROUPS = {
    "visibility": visibility_faults,
    "scores": score_faults,
    "output": output_faults,
    "gradients": gradient_faults,
    "masks": mask_faults,
    "encodings": encoding_faults,
    "rotary": rotary_faults,
    "layers": layer_faults,
    "rounding": rounding_faults,
    "precision": precision_faults,
    "memory": memory_faults,
    "random": random_faults,
    "models": model_faults,
    "training": training_faults,
}


@cache
def all_faults() -> tuple[Fault, ...]:
    """Ids are unique."""
    found = [fault for group in GROUPS.values() for fault in group.faults()]
    names = [fault.id for fault in found]
    if len(set(names)) != len(names):
        raise ValueError(f"two faults have one id: {sorted(n for n in names if names.count(n) > 1)}")
    wrong = [fault.id for fault in found if fault.strength not in STRENGTHS or not fault.diagnosis]
    if wrong:
        raise ValueError(f"faults must have a strength of {', '.join(STRENGTHS)} and a diagnosis; not so {wrong}")
    return tuple(found)


def group_of(fault: Fault) -> str:
    return next(name for name, group in GROUPS.items() if any(one.id == fault.id for one in group.faults()))
