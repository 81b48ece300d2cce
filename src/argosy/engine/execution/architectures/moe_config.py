"""Parser of the settings of experts in config.json."""

from __future__ import annotations

from argosy.engine.execution.architectures.decoder import MoeArchitecture, RoutingGroups
from argosy.engine.execution.architectures.decoder_families import ModelFamily
from argosy.engine.execution.config.checkpoint_config import MAX_LAYERS, MAX_WIDTH, CheckpointConfig

MAX_EXPERTS = 8192
"""Largest accepted number of experts of a layer."""
MAX_EXPERT_MODULES = 1 << 17
"""Largest accepted number of experts of all layers together."""


def parse_moe(family: ModelFamily, config: CheckpointConfig) -> MoeArchitecture | None:
    """Return the architecture of the experts, or None if the model has none.

    Raises:
        ValueError: A setting is missing, invalid or unsupported.
    """
    match family.moe_style:
        case None:
            return None
        case "deepseek_v2" | "deepseek_v3" as style:
            if config.optional_integer("n_routed_experts", maximum=MAX_EXPERTS) is None:
                return None
            return _parse_deepseek(config, is_v3=style == "deepseek_v3")
        case style:
            is_qwen, is_gpt_oss = style == "qwen", style == "gpt_oss"
    num_experts = config.optional_integer(
        "num_local_experts", maximum=MAX_EXPERTS
    ) or config.integer("num_experts", maximum=MAX_EXPERTS)
    _check_expert_modules(config, num_experts)
    return MoeArchitecture(
        num_experts=num_experts,
        num_experts_per_token=config.integer("num_experts_per_tok", maximum=num_experts),
        intermediate_size=config.integer(
            "moe_intermediate_size" if is_qwen else "intermediate_size", maximum=MAX_WIDTH
        ),
        shared_intermediate_size=config.integer(
            "shared_expert_intermediate_size", maximum=MAX_WIDTH
        )
        if family.has_shared_gate
        else 0,
        has_shared_gate=family.has_shared_gate,
        normalize_weights=config.flag("norm_topk_prob") if is_qwen else True,
        round_weights=is_qwen,
        has_biases=is_gpt_oss,
        is_interleaved=is_gpt_oss,
    )


def moe_layers(config: CheckpointConfig, count: int) -> frozenset[int]:
    """Return the indices of the layers that have experts, of a model with `count` layers that has some."""
    kinds = config.strings("mlp_layer_types")
    if kinds:
        if set(kinds) - {"dense", "sparse"} or len(kinds) != count:
            raise config.error("mlp_layer_types", f"{count} times dense or sparse")
        return frozenset(index for index, kind in enumerate(kinds) if kind == "sparse")
    step = config.optional_integer("decoder_sparse_step") or 1
    interval = config.optional_integer("moe_layer_freq") or 1
    first = config.optional_integer("first_k_dense_replace", minimum=0) or 0
    dense = {int(index) for index in config.numbers("mlp_only_layers")}
    return frozenset(
        index
        for index in range(first, count)
        if index not in dense and (index + 1) % step == 0 and index % interval == 0
    )


def _check_expert_modules(config: CheckpointConfig, num_experts: int) -> None:
    """Raise ValueError if all layers together have more than `MAX_EXPERT_MODULES` experts."""
    num_layers = config.integer("num_hidden_layers", maximum=MAX_LAYERS)
    if num_experts * num_layers > MAX_EXPERT_MODULES:
        raise config.error(
            "num_hidden_layers",
            f"at most {MAX_EXPERT_MODULES // num_experts} with {num_experts} experts",
        )


def _parse_deepseek(config: CheckpointConfig, *, is_v3: bool) -> MoeArchitecture:
    num_experts = config.integer("n_routed_experts", maximum=MAX_EXPERTS)
    _check_expert_modules(config, num_experts)
    num_active = config.integer("num_experts_per_tok", maximum=num_experts)
    scoring = "sigmoid" if is_v3 else "softmax"
    if config.string("scoring_func") not in (None, scoring):
        raise config.error("scoring_func", f"{scoring} for this architecture")
    method = config.string("topk_method")
    methods = {"noaux_tc"} if is_v3 else {"greedy", "group_limited_greedy"}
    if method is not None and method not in methods:
        raise config.error("topk_method", " or ".join(sorted(methods)))
    is_normalized = config.flag("norm_topk_prob")
    if is_normalized and not is_v3:
        raise config.error("norm_topk_prob", "false for this architecture")
    intermediate_size = config.integer("moe_intermediate_size", maximum=MAX_WIDTH)
    shared_experts = (
        config.optional_integer("n_shared_experts", minimum=0, maximum=MAX_EXPERTS) or 0
    )
    return MoeArchitecture(
        num_experts=num_experts,
        num_experts_per_token=num_active,
        intermediate_size=intermediate_size,
        normalize_weights=is_normalized,
        round_weights=False,
        scoring="sigmoid" if is_v3 else "softmax",
        has_score_correction=is_v3,
        routes_in_float32=True,
        groups=_parse_groups(config, num_experts, num_active, scored_experts=2 if is_v3 else 1)
        if method != "greedy"
        else None,
        weight_factor=config.number("routed_scaling_factor"),
        shared_intermediate_size=shared_experts * intermediate_size,
    )


def _parse_groups(
    config: CheckpointConfig, num_experts: int, num_active: int, scored_experts: int
) -> RoutingGroups | None:
    """Return the groups of experts, or None if all experts can be selected."""
    num_groups = config.optional_integer("n_group", maximum=num_experts) or 1
    num_active_groups = config.optional_integer("topk_group", maximum=num_groups) or num_groups
    if num_active_groups == num_groups:
        return None
    group_size, rest = divmod(num_experts, num_groups)
    if rest or group_size < scored_experts:
        raise config.error(
            "n_group", f"a divisor of the {num_experts} experts, with {scored_experts} or more each"
        )
    if num_active_groups * group_size < num_active:
        raise config.error("topk_group", f"enough groups for {num_active} experts per token")
    return RoutingGroups(num_groups, num_active_groups, scored_experts)
