"""Proxy for generation requests: from a parsed request to the last byte of its response.

`CompletionHandlers` parses a request, runs the filters and creates the objects that serve it. All decisions about where
and when it runs are those of the `PlacementCore` (`policy.placement`), which the `PlacementDriver` feeds. A
`RequestProxy` performs them: each attempt is one `UpstreamCall`. The `ResponseRelay` forwards the replica's stream to
the client through a `ResponseWriter`, and checks its timeouts. A `StreamSplice` moves both sockets of a regular stream
to the native `FastPath`. A `DemandMeter` counts the tokens that arrive and are served, for the autoscaler of the fleet.
A `RoutingPreviewer` previews these decisions. A `ResponseCache` answers equal requests with a kept response.
An `AnswerSampler` grades samples of answers. A `TrafficSampler` reads samples of requests for the detection of changes.
"""

from argosy.gateway.proxy.aggregated_choice import AggregatedChoice
from argosy.gateway.proxy.answer_sampler import AnswerSampler
from argosy.gateway.proxy.demand_meter import DemandReport, ModelDemand
from argosy.gateway.proxy.fast_path import FastPath, load_fast_path, prebuild_fast_path
from argosy.gateway.proxy.handlers import CompletionHandlers
from argosy.gateway.proxy.model_call import ResponseReceiver
from argosy.gateway.proxy.refusal_errors import RETRY_AFTER_S, no_replica_error, starting_error
from argosy.gateway.proxy.response_cache import ResponseCache
from argosy.gateway.proxy.routing_preview import RoutingPreview, RoutingPreviewer
from argosy.gateway.proxy.semantic_cache import SemanticCache
from argosy.gateway.proxy.traffic_sampler import TrafficSampler
from argosy.gateway.proxy.upstream_headers import REFUSE_UNKNOWN_FIELDS, forward_notes
