"""Options of a pool whose engine is `argosy`: those of `argosy replica` that the fleet does not set itself."""

from __future__ import annotations

from argosy.engine import REPLICA_OPTIONS
from argosy.settings import define_options

FLEET_OPTIONS = {
    "model": "models[].source",
    "revision": "models[].revision",
    "digest": "models[].digest",
    "served_model_name": "models[].name",
    "drain_deadline": "drain_deadline_s of the pool",
    "zone": "zones of the pool",
    "label": "labels of the pool",
    "log_name": "",
    "host": "",
    "port": "",
    "uds": "",
    "tls_cert": "",
    "tls_key": "",
    "tls_client_ca": "",
}
"""Options of `argosy replica` that the fleet sets, with the setting to use instead. Empty where there is none."""
ArgosyOptions = define_options(
    "ArgosyOptions",
    "Options of `argosy replica`, with its defaults.",
    (option for name, option in REPLICA_OPTIONS.items() if name not in FLEET_OPTIONS),
)
