"""Tools that an agent can run inside a turn.

tool, places, text      a tool, where its calls run, and what the model reads of a result
function_tool           a typed function as a tool, by pydantic
run_calls               the calls of one reply, at the same time
calculator              arithmetic
search                  passages of the text files of a folder
mcp                     the tools of an MCP server
"""

from gymllm_agents.tools.calculator import calculate as calculate
from gymllm_agents.tools.calculator import calculator as calculator
from gymllm_agents.tools.function_tool import tool as tool
from gymllm_agents.tools.mcp import McpServer as McpServer
from gymllm_agents.tools.run_calls import run_calls as run_calls
from gymllm_agents.tools.search import local_search as local_search
from gymllm_agents.tools.tool import Tool as Tool
from gymllm_agents.tools.tool import ToolError as ToolError
from gymllm_agents.tools.tool import ToolFunction as ToolFunction
from gymllm_agents.tools.tool import ToolResult as ToolResult
