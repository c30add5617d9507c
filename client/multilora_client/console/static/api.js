// The console's backend. The API key is in this module's memory and nowhere else; a reload forgets it.

export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

const HEADER = "X-Multilora-Console";
let key = "";
let numKeys = 0;

export function setKey(value) {
  key = value;
  numKeys += 1;
}

/** How many keys were set so far: an answer to an earlier one tells nothing of this one. */
export const keyNumber = () => numKeys;

export const hasKey = () => key !== "";

/** Headers are bytes: those of the key in UTF-8, each written as the character of its number. */
function headers() {
  const bearer = String.fromCharCode(...new TextEncoder().encode(key));
  return { [HEADER]: "1", ...(key && { Authorization: `Bearer ${bearer}` }) };
}

function errorOf(status, body) {
  const { code = "unknown", message = `status ${status}` } = body?.error ?? {};
  return new ApiError(status, code, message);
}

/** What a step of an exchange with the console's process gives; ApiError where the connection breaks. */
async function unbroken(step) {
  try {
    return await step;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "no_console", "the console's own process does not answer");
  }
}

async function ask(path, options = {}) {
  const response = await unbroken(fetch(`api/${path}`, { cache: "no-store", ...options, headers: { ...headers(), ...options.headers } }));
  if (!response.ok) throw errorOf(response.status, await response.json().catch(() => null));
  return response;
}

const asJson = (body) => ({ method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } });

export const get = async (path) => unbroken((await ask(path)).json());
export const post = async (path, body) => unbroken((await ask(path, asJson(body))).json());

/** Lines of JSON as they come. */
export async function* postLines(path, body, signal) {
  const response = await ask(path, { ...asJson(body), signal });
  const decoder = new TextDecoder();
  let rest = "";
  for await (const chunk of response.body) {
    const lines = (rest + decoder.decode(chunk, { stream: true })).split("\n");
    rest = lines.pop();
    for (const line of lines) yield JSON.parse(line);
  }
}

/** Sends files one after the other. onLine: hears the answer's lines; onSent(share): how much has left the browser. */
export function upload(query, files, onLine, onSent) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest(); // fetch does not tell how much of a body is sent
    request.open("POST", `api/uploads?${query}`);
    for (const [name, value] of Object.entries(headers())) request.setRequestHeader(name, value);
    request.upload.addEventListener("progress", (event) => onSent(event.loaded / event.total));
    let numRead = 0;
    const read = () => {
      if (request.status !== 200) return;
      const end = request.responseText.lastIndexOf("\n");
      const text = request.responseText.slice(numRead, end);
      numRead = end + 1;
      for (const line of text.split("\n")) if (line) onLine(JSON.parse(line));
    };
    request.addEventListener("progress", read);
    request.addEventListener("load", () => {
      read();
      if (request.status === 200) return resolve();
      let body = null;
      try {
        body = JSON.parse(request.responseText);
      } catch { /* an answer of something in between */ }
      reject(errorOf(request.status, body));
    });
    request.addEventListener("error", () => reject(new ApiError(0, "no_console", "the connection broke")));
    request.send(new Blob(files));
  });
}
