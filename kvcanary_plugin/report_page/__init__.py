"""Incidents as one self-contained HTML page: no network, no scripts, light and dark."""

from kvcanary_plugin.report_page.page import render_page

__all__ = ["render_page"]
