"""The pure computation of a step: no devices, no jit."""

from .collectives import (
    DATA,
    AxisCollectives,
    Collectives,
    OnRows,
    Results,
)
from .evaluated import evaluated_params, find_evaluated
from .jaxprs import (
    BY_DEFAULT,
    OWN_LOOP,
    Products,
    calls_python,
    equations_in,
    gathers_in_branches,
    has_convolutions,
    has_own_loop,
    opened,
    products,
    programs_in,
    repeated,
    times_of,
)
from .metrics import (
    IN_FLIGHT,
    LONG_IN_FLIGHT,
    Facts,
    Metrics,
)
from .model_call import InferenceModel, check_is_told, named_by, takes_by_name
from .objective import CriterionObjective, LossFnObjective, Objective, split_batch
from .own_call import with_call, without_call
from .parts import (
    FoundPart,
    Part,
    StepsOfParts,
    find_parts,
    mask_of,
    optimizer_of,
    trained_alone,
    trained_by,
    with_clipping,
)
from .per_example import PerExample, per_example
from .precision import (
    as_own,
    as_stored,
    find_precision,
    float32_products,
    note_on_products,
)
from .remat import (
    Recomputed,
    Remat,
    find_recomputed,
    outermost_matching,
    recomputes,
)
from .returned import AfterUpdate
from .state import Batch, Group, TrainState, Weights, first_state
from .steps import Steps
from .value_fn import closed_over, update_with
from .whole import (
    NOTHING,
    KeyData,
    Rowless,
    Whole,
    as_given,
    joined,
    map_rows,
    with_rows,
)
