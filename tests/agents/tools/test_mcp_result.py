"""What MCP servers answer, as text."""

from __future__ import annotations

import base64

import pytest
from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from gymllm_agents.tools.mcp_result import result_text

DATA = base64.b64encode(b"1234567").decode()


@pytest.mark.parametrize(
    ("content", "structured", "text"),
    [
        ([TextContent(text="a"), TextContent(text="b\n")], {"no": 1}, "a\nb\n"),
        ([], {"é": [1, None]}, '{"é": [1, null]}'),
        ([], None, ""),
        ([AudioContent(data=DATA, mime_type="audio/wav")], None, "[audio audio/wav, 7 bytes]"),
        ([AudioContent(data="", mime_type="audio/wav")], 3, "3\n[audio audio/wav, 0 bytes]"),
        ([ResourceLink(name="n", uri="file:///a")], None, "[resource file:///a]"),
        (
            [
                EmbeddedResource(resource=TextResourceContents(uri="file:///a", text="said")),
                EmbeddedResource(resource=BlobResourceContents(uri="file:///b", blob=DATA)),
            ],
            None,
            "said\n[resource file:///b, 7 bytes]",
        ),
    ],
)
def test_each_kind_of_content(content, structured, text):
    assert result_text(CallToolResult(content=content, structured_content=structured)) == text
