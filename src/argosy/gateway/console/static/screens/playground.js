// Playground: a chat or a completion that streams, with tools, its speed, its cost, and the same request as code.
import { html, signal, useEffect, useMemo, useRef, useState } from "../vendor.js";
import { ApiError, call, useResource } from "../core/api.js";
import { count, duration, significant, visible } from "../core/format.js";
import { link, route, setQuery } from "../core/router.js";
import { Card, Field, Name, Resource, Select, copyText } from "../ui/parts.js";
import { TOOL_PROMPTS, ToolCall, ToolResults, ToolSettings, findToolsProblem, readTools, toToolChoice } from "../ui/tools.js";

const MAX_TURNS = 200;
const lanes = [signal([]), signal([])]; // the turns of each model, kept while other screens are open
const EXAMPLES = ["Write a short poem about the sea.", "Explain what a KV cache is in two sentences.", "List three prime numbers."];

export default function Playground() {
  const models = useResource("console/v1/models");
  return html`<${Resource} of=${models} empty="No model is served. Start a replica, or ask for access to a model.">${({ data }) => html`<${Chat} models=${data.map(({ id }) => id)} />`}<//>`;
}

// One conversation with one model and its settings.
function useLane(turns, settings) {
  const [running, setRunning] = useState(null);
  const [stats, setStats] = useState(null);
  const [error, setError] = useState(null);
  const progress = useMemo(() => signal(0), []);
  useEffect(() => () => running?.abort(), [running]);
  const respond = async (history) => {
    const controller = new AbortController();
    const answer = { role: "assistant", text: "", reasoning: "", calls: [], tokens: [] };
    turns.value = [...history, answer];
    setError(null);
    setStats(null);
    setRunning(controller);
    try {
      setStats(await readStream(settings.mode, buildBody(settings, history), controller.signal, answer, drawOnce(progress)));
    } catch (failure) {
      answer.calls = []; // of which some may be incomplete
      if (failure.name !== "AbortError") setError(failure);
    }
    turns.value = [...history, { ...answer }];
    setRunning(null);
  };
  const send = (prompt) => respond([...(settings.mode === "chat" ? trim(turns.value) : []), { role: "user", text: prompt }]);
  const sendResults = (results) => respond([...trim(turns.value), ...turns.value.at(-1).calls.map(({ id, name }, index) => ({ role: "tool", id, name, text: results[index] }))]);
  const clear = () => { turns.value = []; setStats(null); setError(null); };
  const isWaiting = !running && Boolean(turns.value.at(-1)?.calls?.length);
  return { turns: turns.value, settings, running, stats, error, progress, isWaiting, send, sendResults, clear, stop: () => running?.abort() };
}

// The latest turns, from one of the user on: a result without its call would be refused.
function trim(turns) {
  const kept = turns.slice(-MAX_TURNS);
  return kept.slice(Math.max(0, kept.findIndex(({ role }) => role === "user")));
}

// Draws at most once for each frame, since a new page for each token would be slower than the model.
function drawOnce(progress) {
  let frame = 0;
  return () => {
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      progress.value += 1;
    });
  };
}

function Chat({ models }) {
  const { query } = route.value;
  const known = (name) => (models.includes(name) ? name : undefined);
  const shared = { mode: query.mode === "completion" ? "completion" : "chat", system: query.system ?? "", maxTokens: query.max_tokens ?? "256", schema: query.schema ?? "", tools: query.tools ?? "", toolChoice: query.tool_choice ?? "auto", probabilities: query.probabilities === "1" };
  const settings = { ...shared, model: known(query.model) ?? models[0], temperature: query.temperature ?? "" };
  const other = { ...shared, model: known(query.other) ?? models[0], temperature: query.other_temperature ?? "" };
  const first = useLane(lanes[0], settings), second = useLane(lanes[1], other);
  const active = query.other ? [first, second] : [first];
  const [draft, setDraft] = useState("");
  const isRunning = active.some(({ running }) => running), isWaiting = active.some((lane) => lane.isWaiting);
  const problem = findProblem(settings);
  const send = (text) => {
    const prompt = text.trim();
    if (!prompt || isRunning || isWaiting || problem) return;
    setDraft("");
    for (const lane of active) lane.send(prompt);
  };
  return html`<div class="play"><div class="side-form">
    <${Card} title=${settings.mode === "chat" ? "Chat" : "Completion"} actions=${first.turns.length ? html`<button class="btn" disabled=${isRunning} onClick=${() => active.forEach((lane) => lane.clear())}>Clear</button>` : null}>
      <div class=${active.length > 1 ? "columns" : ""}>${active.map((lane, index) => html`<div key=${index}>
        ${active.length > 1 ? html`<h3 class="s">${visible(lane.settings.model)}${lane.settings.temperature === "" ? "" : `, temperature ${lane.settings.temperature}`}</h3>` : null}
        <${Turns} lane=${lane} label=${`Messages of ${lane.settings.model}`} send=${send} />
        ${lane.error ? html`<p class="failure" role="alert">${lane.error.message}</p>` : null}${lane.stats ? html`<${Stats} stats=${lane.stats} />` : null}</div>`)}</div>
      <form class="tail" onSubmit=${(event) => { event.preventDefault(); send(draft); }}>
        <${Field} label="Your message"><textarea name="message" rows="3" value=${draft} onInput=${(event) => setDraft(event.target.value)}
          onKeyDown=${(event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(draft); } }}></textarea><//>
        ${problem ? html`<p class="failure" role="alert">${problem}</p>` : null}
        <div class="row tail"><button class="btn primary" disabled=${isRunning || isWaiting}>Send</button>
          <button type="button" class="btn" disabled=${!isRunning} onClick=${() => active.forEach((lane) => lane.stop())}>Stop</button>
          <span class="s">${isWaiting ? "The model waits for the results of its calls." : "Enter sends, Shift and Enter begins a line."}</span></div></form><//>
    <${AsCode} settings=${settings} draft=${draft} /></div>
    <${Settings} settings=${settings} other=${query.other ? other : null} models=${models} /></div>`;
}

function findProblem({ schema, tools }) {
  try {
    if (schema) JSON.parse(schema);
  } catch (error) {
    return `The JSON schema is not valid JSON: ${error.message}`;
  }
  return findToolsProblem(tools);
}

function Turns({ lane, label, send }) {
  const { turns, running, settings } = lane;
  if (!turns.length) {
    const examples = settings.tools ? [...TOOL_PROMPTS, ...EXAMPLES.slice(1)] : EXAMPLES;
    return html`<div class="turns"><p class="empty">Nothing was sent yet. Try one of these:</p>
      <div class="row">${examples.map((text) => html`<button key=${text} class="btn" onClick=${() => send(text)}>${text}</button>`)}</div></div>`;
  }
  return html`<div class="turns" tabindex="0" role="log" aria-label=${label} aria-live=${running ? "off" : "polite"}>${turns.map((turn, index) => html`
    <div key=${index} class=${`turn ${turn.role}`}><div class="s">${turn.role === "tool" ? html`Result of <${Name} value=${turn.name} />` : turn.role === "user" ? "You" : "Model"}</div>
      ${running && index === turns.length - 1 ? html`<${Streamed} key="stream" turn=${turn} progress=${lane.progress} />`
      : html`<${Answer} key="text" turn=${turn} isColored=${settings.probabilities} />`}</div>`)}
    ${lane.isWaiting ? html`<${ToolResults} key=${`results-${turns.length}`} calls=${turns.at(-1).calls} send=${lane.sendResults} />` : null}</div>`;
}

// The turn that the model writes: only this part is drawn for new text.
function Streamed({ turn, progress }) {
  const box = useRef(null);
  const version = progress.value;
  useEffect(() => {
    const list = box.current.closest(".turns");
    if (list.scrollHeight - list.scrollTop - list.clientHeight < 120) list.scrollTop = list.scrollHeight;
  }, [version]);
  return html`<div ref=${box}><${Answer} turn=${turn} /></div>`;
}

function Answer({ turn, isColored }) {
  return html`${turn.reasoning ? html`<details key="reasoning" class="reasoning" open=${!turn.text}><summary class="s">Reasoning</summary>${turn.reasoning}</details>` : null}
    <div key="text">${isColored && turn.tokens?.length ? html`<${Probabilities} tokens=${turn.tokens} />` : turn.text}</div>
    ${turn.calls?.map((call, index) => html`<${ToolCall} key=${index} call=${call} />`)}`;
}

const Probabilities = ({ tokens }) => html`<div>${tokens.map(({ token, probability }, index) => html`
  <span key=${index} class="probability" title=${`${significant(probability * 100)} %`}
    style=${{ background: `color-mix(in srgb, var(--warnbg) ${Math.round((1 - probability) * 100)}%, transparent)` }}>${token}</span>`)}</div>`;

function Stats({ stats }) {
  const { usage } = stats;
  const rate = usage && stats.ended > stats.first ? (usage.completion_tokens - 1) / (stats.ended - stats.first) : undefined;
  const facts = [
    ["Time to first token", duration(stats.first)], ["Tokens per second", count(rate)], ["In all", duration(stats.ended)],
    ["Prompt tokens", count(usage?.prompt_tokens)], ["Cached", count(usage?.prompt_tokens_details?.cached_tokens)], ["Output tokens", count(usage?.completion_tokens)], ["Ended by", stats.finish ?? "–"],
  ];
  return html`<div class="tail"><dl class="stats">${facts.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    <a href=${link("requests", [stats.id])}>Why did it take so long?</a></div>`;
}

function Settings({ settings, other, models }) {
  const set = (name) => (event) => setQuery({ [name]: event.target.value });
  const options = models.map((id) => [id, visible(id)]);
  return html`<${Card} title="Settings"><div class="side-form">
    <${Select} label="Model" value=${settings.model} options=${options} onChange=${(model) => setQuery({ model })} />
    <${Field} label="Temperature"><input type="number" min="0" max="2" step="0.1" placeholder="of the model" value=${settings.temperature} onChange=${set("temperature")} /><//>
    <${Select} label="Compare with" value=${other?.model ?? ""} options=${[["", "nothing"], ...options]} onChange=${(name) => setQuery({ other: name })} />
    ${other ? html`<${Field} label="Its temperature"><input type="number" min="0" max="2" step="0.1" placeholder="of the model" value=${other.temperature} onChange=${set("other_temperature")} /><//>` : null}
    <${Select} label="Kind" value=${settings.mode} options=${[["chat", "Chat"], ["completion", "Completion"]]} onChange=${(mode) => setQuery({ mode })} />
    ${settings.mode === "chat" ? html`<${Field} label="System prompt"><textarea rows="3" value=${settings.system} onChange=${set("system")}></textarea><//>` : null}
    <${Field} label="Maximum of tokens"><input type="number" min="1" value=${settings.maxTokens} onChange=${set("max_tokens")} /><//>
    <${Field} label="JSON schema of the answer"><textarea class="mono" rows="3" spellcheck=${false} value=${settings.schema} onChange=${set("schema")}></textarea><//>
    ${settings.mode === "chat" ? html`<${ToolSettings} tools=${settings.tools} choice=${settings.toolChoice} />` : null}
    ${settings.mode === "chat" ? html`<label class="row s"><input type="checkbox" checked=${settings.probabilities} onChange=${(event) => setQuery({ probabilities: event.target.checked ? "1" : "" })} /> Show how probable each token was</label>` : null}</div><//>`;
}

function buildBody(settings, history) {
  const body = { model: settings.model };
  const isChat = settings.mode === "chat";
  if (isChat) body.messages = [...(settings.system ? [{ role: "system", content: settings.system }] : []), ...history.map(toMessage).filter(Boolean)];
  else body.prompt = history.at(-1).text;
  if (settings.temperature !== "") body.temperature = Number(settings.temperature);
  if (settings.maxTokens !== "") body.max_tokens = Number(settings.maxTokens);
  if (findProblem(settings)) return body;
  if (settings.schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(settings.schema) } };
  if (settings.tools && isChat) {
    body.tools = readTools(settings.tools);
    if (settings.toolChoice !== "auto") body.tool_choice = toToolChoice(settings.toolChoice);
  }
  if (settings.probabilities && isChat) body.logprobs = true;
  return body;
}

// A turn as a message of the API. A response that ended before its first token is none.
function toMessage({ role, text, calls, id }) {
  if (role === "tool") return { role, tool_call_id: id, content: text };
  if (calls?.length) return { role, content: text || null, tool_calls: calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } })) };
  return text ? { role, content: text } : null;
}

// Streams one response into `answer`. Calls `onChange` for each piece, and returns the times in seconds and the usage.
async function readStream(mode, body, abort, answer, onChange) {
  const started = performance.now();
  const elapsed = () => (performance.now() - started) / 1000;
  const path = mode === "chat" ? "console/v1/chat/completions" : "console/v1/completions";
  const response = await call("POST", path, { ...body, stream: true, stream_options: { include_usage: true } }, abort);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const result = { id: response.headers.get("x-request-id"), first: undefined, ended: undefined, usage: null, finish: null };
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new ApiError(response.status, event.error);
      result.id = event.id ?? result.id;
      result.usage = event.usage ?? result.usage;
      const [choice] = event.choices ?? [];
      if (!choice) continue;
      result.finish = choice.finish_reason ?? result.finish;
      const delta = mode === "chat" ? choice.delta : { content: choice.text };
      if (!addDelta(answer, delta)) continue;
      answer.tokens.push(...(choice.logprobs?.content ?? []).map(({ token, logprob }) => ({ token, probability: Math.exp(logprob) })));
      result.first ??= elapsed();
      onChange();
    }
  }
  result.ended = elapsed();
  return result;
}

// Adds a piece of the response. Returns whether it has any content.
function addDelta(answer, delta) {
  const reasoning = delta.reasoning_content ?? delta.reasoning;
  answer.reasoning += reasoning ?? "";
  answer.text += delta.content ?? "";
  for (const { index, id, function: called } of delta.tool_calls ?? []) {
    const call = (answer.calls[index ?? 0] ??= { id: "", name: "", arguments: "" });
    call.id ||= id ?? "";
    call.name += called?.name ?? "";
    call.arguments += called?.arguments ?? "";
  }
  return Boolean(reasoning || delta.content || delta.tool_calls?.length);
}

const CODE = {
  curl: (url, path, body) => `curl ${url}/v1/${path} \\\n  -H 'authorization: Bearer '"$ARGOSY_API_KEY" \\\n  -H 'content-type: application/json' \\\n  -d '${JSON.stringify(body).replaceAll("'", "'\\''")}'`,
  Python: (url, path, body) => `import os\nimport openai\n\nclient = openai.OpenAI(base_url="${url}/v1", api_key=os.environ.get("ARGOSY_API_KEY", "none"))\nresponse = client.${path === "completions" ? "completions" : "chat.completions"}.create(\n${Object.entries(body).map(([name, value]) => `    ${name}=${toPython(value)},`).join("\n")}\n)\nprint(${shown(path, body)})`,
  JavaScript: (url, path, body) => `import OpenAI from "openai";\n\nconst client = new OpenAI({ baseURL: "${url}/v1", apiKey: process.env.ARGOSY_API_KEY ?? "none" });\nconst response = await client.${path === "completions" ? "completions" : "chat.completions"}.create(${JSON.stringify(body, null, 2)});\nconsole.log(${shown(path, body)});`,
};
const shown = (path, body) => `response.choices[0].${path === "completions" ? "text" : body.tools ? "message" : "message.content"}`;
// JSON as Python. Strings have the same form in both.
const toPython = (value) => JSON.stringify(value).replace(/("(?:[^"\\]|\\.)*")|\b(true|false|null)\b/g, (_, text, word) => text ?? { true: "True", false: "False", null: "None" }[word]);

function AsCode({ settings, draft }) {
  const [language, setLanguage] = useState("curl");
  const turns = settings.mode === "chat" ? trim(lanes[0].value) : [];
  const history = turns.at(-1)?.role === "assistant" && !draft ? turns.slice(0, -1) : turns;
  const body = buildBody(settings, draft || !history.length ? [...history, { role: "user", text: draft || EXAMPLES[0] }] : history);
  const base = new URL(".", location.href).href.replace(/\/$/, "");
  const code = CODE[language](base, settings.mode === "chat" ? "chat/completions" : "completions", body);
  return html`<${Card} title="The same request as code" actions=${html`<button class="btn" onClick=${() => copyText(code, "The code")}>Copy</button>`}>
    <div class="seg" role="group" aria-label="Language">${Object.keys(CODE).map((name) => html`<button key=${name} aria-pressed=${name === language} onClick=${() => setLanguage(name)}>${name}</button>`)}</div>
    <pre tabindex="0" class="tail">${code}</pre><//>`;
}
