"""What an MCP server answered, as text for the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gymllm_agents.tools.text import as_text

if TYPE_CHECKING:
    from mcp_types import CallToolResult, ContentBlock


def result_text(result: CallToolResult) -> str:
    """The texts, each on lines of its own; what is no text is named. Without texts the JSON."""
    lines = [_block_text(block) for block in result.content]
    has_text = any(block.type == "text" and block.text for block in result.content)
    if result.structured_content is not None and not has_text:
        lines.insert(0, as_text(result.structured_content))
    return "\n".join(line for line in lines if line)


def _block_text(block: ContentBlock) -> str:
    match block.type:
        case "text":
            return block.text
        case "image" | "audio":
            return f"[{block.type} {block.mime_type}, {_size_bytes(block.data)} bytes]"
        case "resource_link":
            return f"[resource {block.uri}]"
        case "resource":
            resource = block.resource
            text = getattr(resource, "text", None)
            if isinstance(text, str):
                return text
            size = _size_bytes(str(getattr(resource, "blob", "")))
            return f"[resource {resource.uri}, {size} bytes]"


def _size_bytes(base64: str) -> int:
    return len(base64) * 3 // 4 - base64.count("=", -2)
