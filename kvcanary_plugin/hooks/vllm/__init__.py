"""vLLM: plugin entry point, flag, caches, batches of both model runners.

``plugin.py`` is called in every process of the server; ``flag.py`` gives the server its flag and
its ``/metrics`` the values that workers count; ``attach.py`` puts the canary around the forwards of
a worker; ``caches.py`` says what memory is guarded; ``requests.py`` knows who stands in a batch;
``v1.py`` and ``v2.py`` translate the batches of the two model runners; ``versions.py`` holds what
differs between vLLM versions.
"""
