"""Dialects of other APIs as pure translations to and from the chat API: Responses, Anthropic Messages and Ollama.

A `translate_*` function turns a request's body into a `TranslatedRequest`: the body of a chat, which is the only form
that replicas see, and the builder of the response. The gateway runs the chat as any other one. A `DialectTranslator`
reads its events or its whole response with a `ChatOutputReader`, which calls the builder (a `DialectOutput`). A stream
and a whole response come from the same calls, so they say the same.
"""

from argosy.protocol.dialects.anthropic_output import AnthropicOutput, encode_anthropic_error
from argosy.protocol.dialects.anthropic_requests import (
    CountTokensRequest,
    MessagesRequest,
    translate_count_tokens_request,
    translate_messages_request,
)
from argosy.protocol.dialects.chat_output_reader import parse_error_body
from argosy.protocol.dialects.chat_request import RenderedRequest, TranslatedRequest
from argosy.protocol.dialects.dialect_output import (
    DialectOutput,
    OutputIdentity,
)
from argosy.protocol.dialects.dialect_translator import (
    BodyTranslator,
    DialectTranslator,
    EndListener,
    ErrorEncoder,
    ObjectTranslator,
)
from argosy.protocol.dialects.ollama_output import (
    NDJSON_CONTENT_TYPE,
    OllamaOutput,
    encode_ollama_error,
    format_timestamp,
)
from argosy.protocol.dialects.ollama_requests import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaModelRequest,
    is_load_request,
    strip_tag,
    translate_ollama_chat,
    translate_ollama_generate,
)
from argosy.protocol.dialects.pooling_requests import (
    CohereEmbedRequest,
    CohereRerankRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    is_tei_request,
    translate_cohere_embed,
    translate_cohere_rerank,
    translate_ollama_embed,
    translate_ollama_embeddings,
    translate_tei_rerank,
)
from argosy.protocol.dialects.responses_compaction import (
    CompactRequest,
    translate_compact_request,
)
from argosy.protocol.dialects.responses_input import (
    assign_item_ids,
    list_references,
    normalize_input,
    resolve_references,
)
from argosy.protocol.dialects.responses_output import (
    ResponsesOutput,
    encode_responses_error,
    render_end_event,
    render_stored_events,
)
from argosy.protocol.dialects.responses_requests import (
    ClientEvent,
    Metadata,
    ReasoningCipher,
    ResponsesRequest,
    parse_create_event,
    parse_responses_request,
    translate_responses_request,
)
