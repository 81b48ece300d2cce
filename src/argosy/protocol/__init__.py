"""Wire formats that gateway, replicas and clients share.

Request bodies (`openai_requests`) are decoded by `parse_request_body`, which ignores unknown fields and turns every
mistake into an `ApiError`. `parse_body` refuses unknown fields too. Responses
(`openai_responses`) and errors have the shapes of the OpenAI API with vLLM's extensions. Streams are framed with
`format_event` and read with `EventParser`. Validated requests reach the engine with `SamplingParams`. A replica
publishes the blocks of its prefix cache as `KvEvent`. Server addresses are parsed into an `Endpoint`. `OpenApiBuilder`
describes a server's API.
"""

from argosy.protocol.arithmetic import ArithmeticIdentity, differing_parts
from argosy.protocol.endpoint import Endpoint, parse_endpoint
from argosy.protocol.error_codes import ERROR_CODES, ErrorCode
from argosy.protocol.errors import ApiError, invalid_request
from argosy.protocol.kv_events import (
    BLOCK_NAME_BYTES,
    KvEvent,
    TokenizationKey,
    pack_block_names,
    unpack_block_names,
)
from argosy.protocol.load_report import (
    LOAD_SCHEMA_VERSION,
    LoadPhase,
    LoadResponse,
    StartupProgress,
)
from argosy.protocol.openai_requests import (
    ChatCompletionRequest,
    ChatMessageParam,
    CompletionRequest,
    ContentPart,
    DetokenizeRequest,
    DrainRequest,
    GenerationRequest,
    JsonObject,
    ResumeInput,
    StreamOptions,
    TokenizeRequest,
)
from argosy.protocol.openai_responses import (
    MAX_COUNT,
    ChatChoice,
    ChatCompletion,
    ChatLogprob,
    ChatLogprobs,
    ChatMessage,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    DetokenizeResponse,
    EarlyStopReason,
    ErrorBody,
    ErrorDetail,
    FinishReason,
    ModelCard,
    ModelList,
    PromptLogprob,
    PromptLogprobs,
    ResponseWarning,
    StatusResponse,
    TokenizeResponse,
    ToolCall,
    ToolCallCustom,
    ToolCallFunction,
    TopLogprob,
    Usage,
    VersionResponse,
    find_early_stop,
)
from argosy.protocol.openapi import (
    JSON_MEDIA_TYPE,
    OpenApiBuilder,
    SharedErrors,
    path_parameter,
)
from argosy.protocol.parameter_rules import (
    MAX_LOGPROBS,
    PARAMETER_RANGES,
    NumericRange,
    check_parameters,
    check_range,
    format_number,
    ignored_parameters,
    normalize_stop_strings,
    unsupported_parameter,
)
from argosy.protocol.parsing import parse_body, parse_query, parse_request_body
from argosy.protocol.replica_report import (
    MAX_REPORTED_CHARS,
    REPORT_CONTENT,
    REPORT_HEADER,
    ReplicaReport,
    parse_replica_report,
)
from argosy.protocol.sampling import ReasoningBlock, SamplingParams
from argosy.protocol.sse import SSE_CONTENT_TYPE as SSE_CONTENT_TYPE
from argosy.protocol.sse import SSE_DONE as SSE_DONE
from argosy.protocol.sse import EventParser, LineBuffer, format_comment, format_event
from argosy.protocol.token_usage import NO_TOKENS, TokenUsage
from argosy.protocol.unknown_fields import (
    IGNORED_FIELDS_HEADER,
    RELAXED_SCHEMA_HEADER,
    format_names,
)

__all__ = [
    "BLOCK_NAME_BYTES",
    "ERROR_CODES",
    "IGNORED_FIELDS_HEADER",
    "JSON_MEDIA_TYPE",
    "LOAD_SCHEMA_VERSION",
    "MAX_COUNT",
    "MAX_LOGPROBS",
    "MAX_REPORTED_CHARS",
    "NO_TOKENS",
    "PARAMETER_RANGES",
    "RELAXED_SCHEMA_HEADER",
    "REPORT_CONTENT",
    "REPORT_HEADER",
    "SSE_CONTENT_TYPE",
    "SSE_DONE",
    "ApiError",
    "ArithmeticIdentity",
    "ChatChoice",
    "ChatCompletion",
    "ChatCompletionRequest",
    "ChatLogprob",
    "ChatLogprobs",
    "ChatMessage",
    "ChatMessageParam",
    "Completion",
    "CompletionChoice",
    "CompletionLogprobs",
    "CompletionRequest",
    "ContentPart",
    "DetokenizeRequest",
    "DetokenizeResponse",
    "DrainRequest",
    "EarlyStopReason",
    "Endpoint",
    "ErrorBody",
    "ErrorCode",
    "ErrorDetail",
    "EventParser",
    "FinishReason",
    "GenerationRequest",
    "JsonObject",
    "KvEvent",
    "LineBuffer",
    "LoadPhase",
    "LoadResponse",
    "ModelCard",
    "ModelList",
    "NumericRange",
    "OpenApiBuilder",
    "PromptLogprob",
    "PromptLogprobs",
    "ReasoningBlock",
    "ReplicaReport",
    "ResponseWarning",
    "ResumeInput",
    "SamplingParams",
    "SharedErrors",
    "StartupProgress",
    "StatusResponse",
    "StreamOptions",
    "TokenUsage",
    "TokenizationKey",
    "TokenizeRequest",
    "TokenizeResponse",
    "ToolCall",
    "ToolCallCustom",
    "ToolCallFunction",
    "TopLogprob",
    "Usage",
    "VersionResponse",
    "check_parameters",
    "check_range",
    "differing_parts",
    "find_early_stop",
    "format_comment",
    "format_event",
    "format_names",
    "format_number",
    "ignored_parameters",
    "invalid_request",
    "normalize_stop_strings",
    "pack_block_names",
    "parse_body",
    "parse_endpoint",
    "parse_query",
    "parse_replica_report",
    "parse_request_body",
    "path_parameter",
    "unpack_block_names",
    "unsupported_parameter",
]
