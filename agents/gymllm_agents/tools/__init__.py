"""Tools that an agent can run inside a turn.

tool, places, text      a tool, where its calls run, and what the model reads of a result
function_tool           a typed function as a tool, by pydantic
run_calls               the calls of one reply, at the same time
held                    what tools hold open during an episode
calculator              arithmetic
search                  passages of the text files of a folder
mcp                     the tools of an MCP server
sandbox_tools           a shell, Python programs and an editor, in a sandbox of each episode
"""

from gymllm_agents.tools.calculator import calculate as calculate
from gymllm_agents.tools.calculator import calculator as calculator
from gymllm_agents.tools.function_tool import tool as tool
from gymllm_agents.tools.held import Held as Held
from gymllm_agents.tools.mcp import McpServer as McpServer
from gymllm_agents.tools.run_calls import run_calls as run_calls
from gymllm_agents.tools.sandbox_tools import SANDBOX_TOOLS as SANDBOX_TOOLS
from gymllm_agents.tools.sandbox_tools import check_sandbox as check_sandbox
from gymllm_agents.tools.sandbox_tools import sandbox_tools as sandbox_tools
from gymllm_agents.tools.search import local_search as local_search
from gymllm_agents.tools.tool import Tool as Tool
from gymllm_agents.tools.tool import ToolError as ToolError
from gymllm_agents.tools.tool import ToolFunction as ToolFunction
from gymllm_agents.tools.tool import ToolResult as ToolResult
