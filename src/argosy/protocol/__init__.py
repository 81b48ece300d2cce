"""Wire formats that gateway, replicas and clients share.

Request bodies (`openai_requests`) are decoded by `parse_request_body`, which ignores unknown fields and turns every
mistake into an `ApiError`. `parse_body` refuses unknown fields too. Responses
(`openai_responses`) and errors have the shapes of the OpenAI API with vLLM's extensions. Streams are framed with
`format_event` and read with `EventParser`. Validated requests reach the engine with `SamplingParams`.
`pooling_requests` and `pooling_responses` are those of models that pool: embeddings, scores and classes. A replica
publishes the blocks of its prefix cache as `KvEvent`. Server addresses are parsed into an `Endpoint`. An `Operation`
describes a route in a server's OpenAPI document.
"""

from argosy.protocol.arithmetic import ArithmeticIdentity, differing_parts
from argosy.protocol.endpoint import Endpoint, parse_endpoint
from argosy.protocol.error_codes import ERROR_CODES
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
    EVENTS_MEDIA_TYPE,
    JSON_MEDIA_TYPE,
    LENIENT_BODIES,
    TEXT_SCHEMA,
    Operation,
    SharedErrors,
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
from argosy.protocol.parsing import parse_body, parse_query, parse_request_body
from argosy.protocol.pooling_requests import (
    MAX_INPUTS,
    MODEL_LIMIT,
    ClassifyRequest,
    EmbeddingRequest,
    EmbedDType,
    Endianness,
    NormalizedInput,
    PooledRequest,
    PoolingRequest,
    PoolingTaskName,
    RerankRequest,
    ScoreRequest,
    TaskName,
    list_inputs,
    unsupported_task_error,
)
from argosy.protocol.pooling_responses import (
    Classification,
    ClassificationList,
    Embedding,
    EmbeddingList,
    PooledResponse,
    PoolingList,
    PoolingOutput,
    PoolingUsage,
    RerankedDocument,
    RerankResponse,
    RerankResult,
    Score,
    ScoreList,
    rank_documents,
)
from argosy.protocol.replica_report import (
    MAX_REPORTED_CHARS,
    REPORT_CONTENT,
    REPORT_HEADER,
    RequestReport,
    parse_replica_report,
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
from argosy.protocol.token_usage import NO_TOKENS, TokenUsage
from argosy.protocol.unknown_fields import (
    IGNORED_FIELDS_HEADER,
    RELAXED_SCHEMA_HEADER,
    format_names,
)
