"""Settings: one pydantic model, loaded from YAML and variables, watched while serving."""

from kvcanary_plugin.config.load import CONFIG_PATH_VARIABLE, load_config
from kvcanary_plugin.config.model import CHECK_NAMES, RESERVED_LABELS, CanaryConfig
from kvcanary_plugin.config.problems import ConfigError, ConfigProblem
from kvcanary_plugin.config.settings import Setting, iter_settings
from kvcanary_plugin.config.watch import ConfigWatcher

__all__ = [
    "CHECK_NAMES",
    "CONFIG_PATH_VARIABLE",
    "RESERVED_LABELS",
    "CanaryConfig",
    "ConfigError",
    "ConfigProblem",
    "ConfigWatcher",
    "Setting",
    "iter_settings",
    "load_config",
]
