"""Traffic: which pool and which version of it answers a request.

A `TrafficRoute` is declared for a public model name. Its weights select a pool, and its fallback pools take over from
one that cannot serve in time. The `PoolRoute` of that pool selects the version. It is the one record that a rollout
writes, so a rollback is one write of `PoolRoute.roll_back`. Assignments are sticky: `hash_point` places each user at a
fixed point, and `choose_salt` finds a salt that divides the traffic evenly. A `ShadowSampler` selects the requests that
are copied to a version before it serves any user. A `FeatureFlag` is a choice that conditions of rules read, and
`FlagRules` evaluate it.

A `PromptClassifier` scores prompts by cheap features, so that simple ones go to a smaller model. `classifier_training`
makes one from labelled prompts. A `ShareController` moves its threshold until a wanted share of the traffic holds.
`build_judge_prompt` and `parse_grade` let a model grade answers.
"""

from argosy.policy.traffic.answer_grade import JUDGE_TOKENS, build_judge_prompt, parse_grade
from argosy.policy.traffic.feature_flag import (
    FLAG_VARIABLES,
    FeatureFlag,
    FlagCondition,
    FlagDecision,
    FlagError,
    FlagName,
    FlagRules,
    FlagState,
    VariantName,
)
from argosy.policy.traffic.pool_route import (
    PoolRoute,
    RouteRollback,
    ShadowCopy,
    ShadowSampler,
    Variant,
    VersionChoice,
    clamp_share,
)
from argosy.policy.traffic.prompt_classifier import (
    ClassifiedModel,
    ClassifierTarget,
    CurvePoint,
    ModelCard,
    PromptClassifier,
)
from argosy.policy.traffic.prompt_features import (
    FEATURES,
    MAX_READ_CHARS,
    Language,
    PromptSample,
    detect_language,
    measure_features,
)
from argosy.policy.traffic.share_controller import ShareController
from argosy.policy.traffic.sticky_hash import (
    ALL_TENANTS,
    SaltChoice,
    TrafficSubject,
    UserTraffic,
    choose_salt,
    choose_weighted,
    hash_point,
    heavy_tenants,
    sticky_key,
)
from argosy.policy.traffic.traffic_route import (
    DailyWindow,
    ServingChoice,
    TrafficRoute,
    WeightedPool,
)
