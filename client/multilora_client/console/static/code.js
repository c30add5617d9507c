// A request of the playground as programs send it.

import { copy, el, openDialog, say } from "./dom.js";
import { title } from "./format.js";

const KEY = "MULTILORA_API_KEY";

/** Names of the same options elsewhere. */
const TRITON = { top_k: "runtime_top_k", top_p: "runtime_top_p" };
const OPENAI = new Set(["max_tokens", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed"]);
const INTEGERS = new Set(["max_tokens", "top_k"]);

/** To the server a temperature by itself asks for nothing, since clients of TensorRT-LLM always send it. */
function completed(options) {
  const isBare = "temperature" in options && !("top_k" in options) && !("top_p" in options);
  return isBare ? { ...options, top_k: 0 } : options;
}

/** A value as Python writes it. */
function python(value) {
  if (value === null || value === undefined) return "None";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([name, member]) => `${python(name)}: ${python(member)}`).join(", ")}}`;
  return JSON.stringify(value); // a JSON string is a Python string: its escapes mean the same
}

/** A text in single quotes, as a shell reads it. */
const shell = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

function adapterFields(adapter) {
  if (!adapter) return {};
  return adapter.name ? { lora_name: adapter.name } : { lora_task_id: adapter.lora_task_id };
}

function curl({ adapter, prompt, options, urls, hasKey }) {
  const fields = {
    ...("prompt" in prompt ? { text_input: prompt.prompt } : { messages: JSON.stringify(prompt.messages) }),
    ...(adapter?.name && { lora_name: adapter.name }),
    exclude_input_in_output: true,
  };
  for (const [name, value] of Object.entries(completed(options))) fields[TRITON[name] ?? name] = value;
  let body = JSON.stringify(fields);
  // 64 bits: more than a JavaScript number holds.
  if (adapter && !adapter.name) body = body.replace(/}$/, `,"lora_task_id":${adapter.lora_task_id}}`);
  const url = `${urls.http || "http://localhost:8000"}/v2/models/generation_unary/generate`;
  if (!hasKey) return `curl -s ${url} -d ${shell(body)}`;
  const keyed = body.replace(/}$/, `,"authorization":"Bearer `);
  return `curl -s ${url} -d ${shell(keyed)}"$${KEY}"${shell('"}')}`;
}

function tritonclient({ adapter, prompt, options, urls, hasKey }) {
  const target = (urls.grpc || "localhost:8001").replace(/^grpcs?:\/\//, "");
  const isHttp = /^https?:/.test(target);
  const tensors = ["prompt" in prompt
    ? `tensor("text_input", ${python([[prompt.prompt]])}, object, "BYTES")`
    : `tensor("messages", [[json.dumps(${python(prompt.messages)})]], object, "BYTES")`];
  if (adapter?.name) tensors.push(`tensor("lora_name", ${python([[adapter.name]])}, object, "BYTES")`);
  else if (adapter) tensors.push(`tensor("lora_task_id", [[${adapter.lora_task_id}]], np.uint64, "UINT64")`);
  for (const [name, value] of Object.entries(completed(options))) {
    const kind = name === "stop_words" ? 'object, "BYTES"' : name === "seed" ? 'np.uint64, "UINT64"' : INTEGERS.has(name) ? 'np.int32, "INT32"' : 'np.float32, "FP32"';
    tensors.push(`tensor("${TRITON[name] ?? name}", ${python(Array.isArray(value) ? [value] : [[value]])}, ${kind})`);
  }
  tensors.push('tensor("exclude_input_in_output", [[True]], bool, "BOOL")');
  const call = hasKey ? `, headers={"authorization": f"Bearer {os.environ['${KEY}']}"}` : "";
  return `${"messages" in prompt ? "import json\n" : ""}${hasKey ? "import os\n" : ""}${"messages" in prompt || hasKey ? "\n" : ""}import numpy as np
import tritonclient.${isHttp ? "http" : "grpc"} as triton


def tensor(name, values, dtype, datatype):
    array = np.array(values, dtype)
    tensor = triton.InferInput(name, array.shape, datatype)
    tensor.set_data_from_numpy(array)
    return tensor


inputs = [
    ${tensors.join(",\n    ")},
]
client = triton.InferenceServerClient(${python(target.replace(/^https?:\/\//, ""))})
answer = client.infer("generation_unary", inputs${call})
print(answer.as_numpy("text_output").item().decode())`;
}

function openai({ adapter, prompt, options, urls, hasKey }) {
  const base = new URL(urls.openai || "http://localhost:9000/v1", location.href).href;
  const model = adapter ? adapter.name || `lora-${adapter.lora_task_id}` : "base";
  const known = Object.entries(options).filter(([name]) => OPENAI.has(name)).map(([name, value]) => `${name}=${python(value)}`);
  if (options.stop_words) known.push(`stop=${python(options.stop_words)}`);
  const more = Object.fromEntries(Object.entries(options).filter(([name]) => !OPENAI.has(name) && name !== "stop_words"));
  if (Object.keys(more).length) known.push(`extra_body=${python(more)}`);
  if (!("temperature" in options) && !Object.keys(options).some((name) => /top_|min_p/.test(name))) known.push("temperature=0");
  const isChat = "messages" in prompt;
  const asked = isChat ? `messages=${python(prompt.messages)}` : `prompt=${python(prompt.prompt)}`;
  const comment = adapter ? "# A model of this name is one that `multilora openai` was given, or the key's own with --forward-keys.\n" : "";
  return `${hasKey ? "import os\n\n" : ""}import openai

${comment}client = openai.OpenAI(base_url=${python(base)}, api_key=${hasKey ? `os.environ["${KEY}"]` : '"none"'})
answer = client.${isChat ? "chat.completions" : "completions"}.create(
    model=${python(model)},
    ${[asked, ...known].join(",\n    ")},
)
print(answer.choices[0].${isChat ? "message.content" : "text"})`;
}

function multilora({ adapter, prompt, options, urls }) {
  const fields = { ...adapterFields(adapter) };
  const named = [];
  if ("prompt" in prompt) named.push(python(prompt.prompt));
  else named.push(`messages=${python(prompt.messages)}`);
  if (fields.lora_name) named.push(`lora_name=${python(fields.lora_name)}`);
  if (fields.lora_task_id) named.push(`adapter=${fields.lora_task_id}`);
  for (const [name, value] of Object.entries(options)) named.push(`${name}=${python(value)}`);
  return `from multilora_client import Client

with Client(${python(urls.grpc || "grpc://localhost:8001")}) as client:  # the API key is the environment's ${KEY}
    for chunk in client.stream(
        ${named.join(",\n        ")},
    ):
        print(chunk.text, end="", flush=True)`;
}

const LANGUAGES = { curl, tritonclient, openai, multilora };

/** asked: {columns, prompt(column), options, urls, hasKey}. */
export function openCode(asked) {
  const { columns } = asked;
  const code = el("pre", { class: "code", tabIndex: 0, "aria-label": "Code" });
  let language = "curl";
  let column = columns.find((one) => one.adapter) ?? columns[0];
  const show = () => say(code, LANGUAGES[language]({ ...asked, adapter: column.adapter, prompt: asked.prompt(column) }));
  const tabs = Object.keys(LANGUAGES).flatMap((name) => [
    el("input", { type: "radio", name: "language", id: `code-${name}`, checked: name === language, on: { change: () => { language = name; show(); } } }),
    el("label", { for: `code-${name}` }, name),
  ]);
  const who = el("select", { "aria-label": "Who is asked", on: { change: () => { column = columns[who.selectedIndex]; show(); } } },
    columns.map((one) => el("option", { selected: one === column }, one.adapter ? title(one.adapter) : "base model")));
  openDialog("The request as code", () => el("div", {},
    el("div", { class: "bar" }, el("div", { class: "segmented", role: "radiogroup", "aria-label": "Language" }, tabs), who, el("span", { class: "grow" }),
      el("button", { type: "button", on: { click: () => copy(code.textContent) } }, "Copy")),
    code), { class: "wide" });
  show();
}
