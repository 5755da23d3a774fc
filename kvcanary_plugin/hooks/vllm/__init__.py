"""vLLM: plugin entry point, flag, pools, batches of both model runners.

``plugin.py`` is called in every process of the server; ``flag.py`` gives the server its flag and
its ``/metrics`` the values that workers count; ``attach.py`` puts the canary around the forwards of
a worker; ``pools.py`` says what memory is guarded, ``layouts.py`` which bytes a slot owns in it;
``requests.py`` knows who stands in a batch, ``media.py`` what stands behind placeholders;
``batch_v1.py`` and ``batch_v2.py`` translate the batches of the two model runners; ``transfers.py``
adopts what KV connectors bring; ``aborts.py`` ends requests that were hit; ``features.py`` says
what is covered; ``versions.py`` holds what differs between vLLM versions.
"""
