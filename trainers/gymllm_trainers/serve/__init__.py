"""`gymllm-serve`: the embedded engine behind HTTP, in OpenAI's protocol and in SGLang's.

settings                    what the command line can say
server                      the model, the engine, the socket, the end
app                         which path is answered by what
connection                  bodies in, answers and event streams out, vanished clients, the key
problems                    errors as HTTP has them
fields                      a JSON object to a dataclass, every unknown field named
service                     what all routes share
running                     requests that run, and how they are ended
requests                    how they are sampled, in the engine's terms
answer, visible_text        what a request has come to so far, and the text of it that may be shown
chat_form, chat_messages    messages to ids and replies to messages, by the model's own template
openai_shapes, chat, completions    OpenAI's two routes
generate, control, weights          SGLang's
"""

from gymllm_trainers.serve.settings import ServeSettings as ServeSettings

__all__ = ["ServeSettings"]
