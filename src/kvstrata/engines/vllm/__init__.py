"""vLLM's connector: `--kv-transfer-config` with this module's path and the class below.

    {"kv_connector": "KVStrataConnector",
     "kv_connector_module_path": "kvstrata.engines.vllm",
     "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
     "kv_connector_extra_config": {"host": {"capacity": "64GiB"}}}

The only package that imports vllm.
"""

from kvstrata.engines.vllm.features import check_features

check_features()

from kvstrata.engines.vllm.connector import KVStrataConnector  # noqa: E402
from kvstrata.engines.vllm.multi_connector import KVStrataMultiConnector  # noqa: E402

__all__ = ["KVStrataConnector", "KVStrataMultiConnector"]
