"""Settings files: YAML that is decoded into msgspec structs, with errors that name file, key, problem and remedy.

`SettingsDocument` reads one file, or several of which each is an overlay of those before it. `yaml_nodes` parses a
file within limits, so that no file can exhaust memory. The document converts its value into a struct (`conversion`).
Then it runs the caller's validation, which raises `SettingError` for a setting. `secret_names` recognises
settings that hold secrets, and `sizes` parses sizes such as `8GiB`.

The module `options` turns fields of a struct into options of commands.
"""

from argosy.settings.change_marks import ByCommandLine, ByOperator, changed_by
from argosy.settings.conversion import (
    SettingError,
    SettingPath,
    convert_settings,
    convert_valid_settings,
    format_path,
)
from argosy.settings.document import SettingsDocument
from argosy.settings.options import (
    DeclaredOption,
    Panel,
    check_fields,
    declared_options,
    define_options,
    option,
)
from argosy.settings.secret_names import is_secret_name, is_secret_value
from argosy.settings.sizes import Size, parse_size
from argosy.settings.yaml_nodes import MAX_SETTINGS_BYTES, dump_yaml, load_yaml
