"""Other APIs in front of the chat API: OpenAI Responses and conversations, Anthropic Messages, Ollama.

Each handler translates a request to a chat, sets a translator on the exchange, and calls the handler of chats. So
authentication, limits, queue, routing, failover, ledger and explanations are those of chats.

`ResponseState` keeps responses and conversations in the store, and `StoredChatHandlers` chats with `store: true`.
`BackgroundResponses` runs responses without the client's connection.
"""

from argosy.gateway.dialects.anthropic_handlers import VERSION_HEADER, AnthropicHandlers
from argosy.gateway.dialects.background_responses import BackgroundResponses
from argosy.gateway.dialects.dialect import ANTHROPIC, OLLAMA, start_rendering
from argosy.gateway.dialects.dialect_routes import ANTHROPIC_ERROR, build_dialect_routes
from argosy.gateway.dialects.file_handlers import ExpiresAfter
from argosy.gateway.dialects.response_state import ResponseState, item_owner
from argosy.gateway.dialects.stored_chat_handlers import StoredChatHandlers
from argosy.gateway.dialects.stored_response_handlers import parse_query_string
