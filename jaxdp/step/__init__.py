"""The pure computation of a step, which the engine compiles: no devices, no jit."""

from .after_update import AfterUpdate
from .call_override import override_call, remove_call_override
from .collectives import (
    DATA,
    AxisCollectives,
    Collectives,
    OnRows,
    Results,
)
from .evaluation_weights import evaluated_params, make_weights_view
from .jaxprs import (
    OWN_LOOP,
    calls_python,
    gathers_in_branches,
    get_inner_jaxprs,
    has_convolutions,
    has_default_products,
    has_own_loop,
    iterate_equations,
    strip_constants,
)
from .metrics import (
    IN_FLIGHT,
    LONG_IN_FLIGHT,
    Facts,
    Metrics,
)
from .micro_batch import Batch, Group
from .model_call import (
    InferenceModel,
    accepts_keyword,
    check_training_flags,
    find_keywords,
)
from .objective import CriterionObjective, LossFnObjective, Objective, split_batch
from .optimizer_call import add_clipping, call_update
from .part_step_functions import MultiPartStepFunctions, combine_optimizers
from .parts import (
    Part,
    ResolvedPart,
    make_leaf_mask,
    mark_trained_alone,
    resolve_parts,
    union_masks,
)
from .per_example import PerExample, per_example
from .precision import (
    Precision,
    cast_arrays,
    cast_to_original,
    find_precision,
    float32_products,
    note_on_products,
)
from .remat import (
    Remat,
    RematSpec,
    find_outermost_modules,
    get_remat_call,
    resolve_remat,
)
from .step_functions import StepFunctions
from .train_state import TrainState, Weights
from .whole import (
    NOTHING,
    KeyData,
    SingleRowBatch,
    Whole,
    find_batched_leaves,
    map_row_leaves,
    merge_leaves,
    to_user_batch,
)
