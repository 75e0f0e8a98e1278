"""The pure computation of a step: no devices, no jit."""

from .collectives import DATA, AxisCollectives, Collectives, ResultKind, RowsInteract
from .each import init_each, update_each
from .ensemble import Ensemble
from .jaxprs import (
    OWN_LOOP,
    equations_in,
    has_convolutions,
    has_own_loop,
    matmul_flops,
    opened,
    programs_in,
    repeated,
    times_of,
)
from .metrics import IN_FLIGHT, LONG_IN_FLIGHT, Facts, Metrics, means_of, new_totals
from .objective import CriterionObjective, LossFnObjective, Objective, split_batch
from .own_call import with_call
from .parts import FoundPart, Part, StepsOfParts, find_parts, optimizer_of, trained_by
from .precision import as_own, as_stored, find_precision
from .python_calls import CallsPython, as_raised, calls_python, catching
from .remat import Remat, check_remat, is_recomputed, outermost_matching
from .row_mixing import values_mix_rows
from .state import Batch, Group, TrainState, Weights, first_state
from .steps import Steps
from .value_fn import closed_over, offered, updates_in
from .whole import Whole, joined, map_rows, with_rows

__all__ = [
    "AxisCollectives",
    "Batch",
    "CallsPython",
    "Collectives",
    "CriterionObjective",
    "DATA",
    "Ensemble",
    "Facts",
    "FoundPart",
    "Group",
    "IN_FLIGHT",
    "LONG_IN_FLIGHT",
    "LossFnObjective",
    "Metrics",
    "OWN_LOOP",
    "Objective",
    "Part",
    "Remat",
    "ResultKind",
    "RowsInteract",
    "Steps",
    "StepsOfParts",
    "TrainState",
    "Weights",
    "Whole",
    "as_own",
    "as_raised",
    "as_stored",
    "calls_python",
    "catching",
    "check_remat",
    "closed_over",
    "equations_in",
    "find_parts",
    "find_precision",
    "first_state",
    "has_convolutions",
    "has_own_loop",
    "init_each",
    "is_recomputed",
    "joined",
    "map_rows",
    "matmul_flops",
    "means_of",
    "new_totals",
    "offered",
    "opened",
    "optimizer_of",
    "outermost_matching",
    "programs_in",
    "repeated",
    "split_batch",
    "times_of",
    "trained_by",
    "update_each",
    "updates_in",
    "values_mix_rows",
    "with_call",
    "with_rows",
]
