"""Wire formats that gateway, replicas and clients share.

Request bodies (`openai_requests`) are decoded by `parse_request_body`, which ignores unknown fields and turns every
mistake into an `ApiError`. `parse_body` refuses unknown fields too. Responses (`openai_responses`) and `errors` have
the shapes of the OpenAI API with vLLM's extensions. Streams are framed with `format_event` and read with `EventParser`.
Validated requests reach the engine with `SamplingParams`. The bodies of models that pool (embeddings, scores and
classes) are in `pooling_api`. A replica publishes the blocks of its prefix cache as `KvEvent`. Server addresses are
parsed into an `Endpoint`. An `Operation` describes a route in a server's OpenAPI document.
"""

from argosy.protocol.endpoint import Endpoint, parse_endpoint
from argosy.protocol.errors import ERROR_CODES, ApiError, invalid_request
from argosy.protocol.openai_requests import (
    ChatCompletionRequest,
    ChatMessageParam,
    CompletionRequest,
    ContentPart,
    DetokenizeRequest,
    DrainRequest,
    GenerationRequest,
    JsonObject,
    LoadLoraAdapterRequest,
    Prediction,
    SleepQuery,
    StreamOptions,
    TokenizeRequest,
    UnloadLoraAdapterRequest,
    WakeUpQuery,
)
from argosy.protocol.openai_responses import (
    MAX_COUNT,
    NO_TOKENS,
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
    FinishReason,
    ModelCard,
    ModelList,
    PredictionUsage,
    PromptLogprob,
    PromptLogprobs,
    ResponseWarning,
    SleepingResponse,
    StatusResponse,
    TokenizeResponse,
    TokenUsage,
    ToolCall,
    ToolCallCustom,
    ToolCallFunction,
    TopLogprob,
    Usage,
    VersionResponse,
    find_early_stop,
)
from argosy.protocol.openapi import (
    EVENTS_MEDIA_TYPE,
    JSON_MEDIA_TYPE,
    TEXT_SCHEMA,
    Operation,
    json_operation,
    render_openapi,
    shared_operations,
)
from argosy.protocol.parameter_rules import (
    MAX_LOGPROBS,
    MAX_TOKENS,
    PARAMETER_RANGES,
    NumericRange,
    check_parameters,
    check_range,
    format_number,
    ignored_parameters,
    normalize_stop_strings,
    unsupported_parameter,
)
from argosy.protocol.parsing import (
    IGNORED_FIELDS_HEADER,
    RELAXED_SCHEMA_HEADER,
    convert_field,
    format_names,
    parse_body,
    parse_query,
    parse_request_body,
)
from argosy.protocol.pooling_api import (
    MAX_INPUTS,
    MODEL_LIMIT,
    Classification,
    ClassificationList,
    ClassifyRequest,
    EmbeddingList,
    EmbeddingObject,
    EmbeddingRequest,
    EmbedDType,
    Endianness,
    NormalizedInput,
    PooledRequest,
    PooledResponse,
    PoolingList,
    PoolingOutput,
    PoolingRequest,
    PoolingTaskName,
    PoolingUsage,
    RerankedDocument,
    RerankRequest,
    RerankResponse,
    RerankResult,
    Score,
    ScoreList,
    ScoreRequest,
    TaskName,
    list_inputs,
    rank_documents,
    unsupported_task_error,
)
from argosy.protocol.replica_reports import (
    ADAPTER_HEADER,
    BLOCK_NAME_BYTES,
    LOAD_SCHEMA_VERSION,
    MAX_REPORTED_ADAPTERS,
    MAX_REPORTED_CHARS,
    PUBLIC_MODEL_HEADER,
    REPORT_CONTENT,
    REPORT_HEADER,
    ArithmeticIdentity,
    KvEvent,
    LoadPhase,
    LoadResponse,
    ModelDescription,
    RequestReport,
    ResidentAdapter,
    ResourceUsage,
    StartupProgress,
    TokenizationKey,
    adapter_digest_prefix,
    differing_parts,
    pack_block_names,
    parse_replica_report,
    unpack_block_names,
)
from argosy.protocol.sampling import (
    ReasoningBlock,
    SamplingParams,
    UnsupportedOption,
    unknown_argument_error,
)
from argosy.protocol.sse import (
    EVENT_END,
    EventParser,
    EventSplitter,
    event_data,
    format_comment,
    format_event,
)
from argosy.protocol.sse import SSE_CONTENT_TYPE as SSE_CONTENT_TYPE
from argosy.protocol.sse import SSE_DONE as SSE_DONE
