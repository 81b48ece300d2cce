// Playground: a chat or a completion that streams, with its speed, its cost, and the same request as code.
import { html, signal, useEffect, useRef, useState } from "../vendor.js";
import { ApiError, call, useResource } from "../core/api.js";
import { count, duration, significant, visible } from "../core/format.js";
import { link, route, setQuery } from "../core/router.js";
import { Card, Field, Resource, Select, copyText } from "../ui/parts.js";

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
  const output = useRef(null);
  useEffect(() => () => running?.abort(), [running]);
  const send = async (prompt) => {
    const controller = new AbortController();
    const before = settings.mode === "chat" ? turns.value.slice(-MAX_TURNS) : [];
    const messages = [...before.filter(({ text }) => text).map(({ role, text }) => ({ role, content: text })), { role: "user", content: prompt }];
    const answer = { role: "assistant", text: "", tokens: [] };
    turns.value = [...before, { role: "user", text: prompt }, answer];
    setError(null);
    setStats(null);
    setRunning(controller);
    const draw = drawer(output, answer);
    try {
      setStats(await readStream(settings.mode, buildBody(settings, messages), controller.signal, (delta, probabilities) => {
        answer.text += delta;
        answer.tokens.push(...probabilities);
        draw();
      }));
    } catch (failure) {
      if (failure.name !== "AbortError") setError(failure);
    }
    turns.value = [...turns.value.slice(0, -1), { ...answer }];
    setRunning(null);
  };
  const clear = () => { turns.value = []; setStats(null); setError(null); };
  return { turns: turns.value, settings, running, stats, error, output, send, clear, stop: () => running?.abort() };
}

function Chat({ models }) {
  const { query } = route.value;
  const known = (name) => (models.includes(name) ? name : undefined);
  const shared = { mode: query.mode === "completion" ? "completion" : "chat", system: query.system ?? "", maxTokens: query.max_tokens ?? "256", schema: query.schema ?? "", probabilities: query.probabilities === "1" };
  const settings = { ...shared, model: known(query.model) ?? models[0], temperature: query.temperature ?? "" };
  const other = { ...shared, model: known(query.other) ?? models[0], temperature: query.other_temperature ?? "" };
  const first = useLane(lanes[0], settings), second = useLane(lanes[1], other);
  const active = query.other ? [first, second] : [first];
  const [draft, setDraft] = useState("");
  const isRunning = active.some(({ running }) => running);
  const problem = findProblem(settings);
  const send = (text) => {
    const prompt = text.trim();
    if (!prompt || isRunning || problem) return;
    setDraft("");
    for (const lane of active) lane.send(prompt);
  };
  return html`<div class="play"><div class="side-form">
    <${Card} title=${settings.mode === "chat" ? "Chat" : "Completion"} actions=${first.turns.length ? html`<button class="btn" disabled=${isRunning} onClick=${() => active.forEach((lane) => lane.clear())}>Clear</button>` : null}>
      <div class=${active.length > 1 ? "two" : ""}>${active.map((lane, index) => html`<div key=${index}>
        ${active.length > 1 ? html`<h3 class="s">${visible(lane.settings.model)}${lane.settings.temperature === "" ? "" : `, temperature ${lane.settings.temperature}`}</h3>` : null}
        <${Turns} lane=${lane} label=${`Messages of ${lane.settings.model}`} send=${send} />
        ${lane.error ? html`<p class="failure" role="alert">${lane.error.message}</p>` : null}${lane.stats ? html`<${Stats} stats=${lane.stats} />` : null}</div>`)}</div>
      <form class="tail" onSubmit=${(event) => { event.preventDefault(); send(draft); }}>
        <${Field} label="Your message"><textarea name="message" rows="3" value=${draft} onInput=${(event) => setDraft(event.target.value)}
          onKeyDown=${(event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(draft); } }}></textarea><//>
        ${problem ? html`<p class="failure" role="alert">${problem}</p>` : null}
        <div class="row tail"><button class="btn primary" disabled=${isRunning}>Send</button>
          <button type="button" class="btn" disabled=${!isRunning} onClick=${() => active.forEach((lane) => lane.stop())}>Stop</button>
          <span class="s">Enter sends, Shift and Enter begins a line.</span></div></form><//>
    <${AsCode} settings=${settings} draft=${draft} /></div>
    <${Settings} settings=${settings} other=${query.other ? other : null} models=${models} /></div>`;
}

function findProblem({ schema }) {
  try {
    if (schema) JSON.parse(schema);
    return null;
  } catch (error) {
    return `The JSON schema is not valid JSON: ${error.message}`;
  }
}

// Writes to one text node for each frame, since a new page for each token would be slower than the model.
function drawer(output, answer) {
  let frame = 0;
  return () => {
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      const box = output.current;
      if (!box) return;
      box.textContent = answer.text;
      const list = box.closest(".turns");
      if (list.scrollHeight - list.scrollTop - list.clientHeight < 120) list.scrollTop = list.scrollHeight;
    });
  };
}

function Turns({ lane, label, send }) {
  const { turns, running, output, settings } = lane;
  if (!turns.length) {
    return html`<div class="turns"><p class="empty">Nothing was sent yet. Try one of these:</p>
      <div class="row">${EXAMPLES.map((text) => html`<button key=${text} class="btn" onClick=${() => send(text)}>${text}</button>`)}</div></div>`;
  }
  return html`<div class="turns" tabindex="0" role="log" aria-label=${label} aria-live=${running ? "off" : "polite"}>${turns.map((turn, index) => html`
    <div key=${index} class=${`turn ${turn.role}`}><div class="s">${turn.role === "user" ? "You" : "Model"}</div>
      ${running && index === turns.length - 1 ? html`<div key="stream" ref=${output}></div>`
      : settings.probabilities && turn.tokens?.length ? html`<${Probabilities} tokens=${turn.tokens} />` : html`<div key="text">${turn.text}</div>`}</div>`)}</div>`;
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
    ${settings.mode === "chat" ? html`<label class="row s"><input type="checkbox" checked=${settings.probabilities} onChange=${(event) => setQuery({ probabilities: event.target.checked ? "1" : "" })} /> Show how probable each token was</label>` : null}</div><//>`;
}

function buildBody(settings, messages) {
  const body = { model: settings.model };
  if (settings.mode === "chat") body.messages = settings.system ? [{ role: "system", content: settings.system }, ...messages] : messages;
  else body.prompt = messages.at(-1).content;
  if (settings.temperature !== "") body.temperature = Number(settings.temperature);
  if (settings.maxTokens !== "") body.max_tokens = Number(settings.maxTokens);
  if (settings.schema && !findProblem(settings)) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(settings.schema) } };
  if (settings.probabilities && settings.mode === "chat") body.logprobs = true;
  return body;
}

// Streams one response. Calls `onDelta` for each piece of text, and returns the times in seconds and the usage.
async function readStream(mode, body, abort, onDelta) {
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
      const delta = mode === "chat" ? (choice.delta.reasoning_content ?? choice.delta.content) : choice.text;
      if (delta) {
        result.first ??= elapsed();
        onDelta(delta, (choice.logprobs?.content ?? []).map(({ token, logprob }) => ({ token, probability: Math.exp(logprob) })));
      }
    }
  }
  result.ended = elapsed();
  return result;
}

const CODE = {
  curl: (url, path, body) => `curl ${url}/v1/${path} \\\n  -H 'authorization: Bearer '"$ARGOSY_API_KEY" \\\n  -H 'content-type: application/json' \\\n  -d '${JSON.stringify(body).replaceAll("'", "'\\''")}'`,
  Python: (url, path, body) => `import os\nimport openai\n\nclient = openai.OpenAI(base_url="${url}/v1", api_key=os.environ.get("ARGOSY_API_KEY", "none"))\nresponse = client.${path === "completions" ? "completions" : "chat.completions"}.create(\n${Object.entries(body).map(([name, value]) => `    ${name}=${toPython(value)},`).join("\n")}\n)\nprint(${path === "completions" ? "response.choices[0].text" : "response.choices[0].message.content"})`,
  JavaScript: (url, path, body) => `import OpenAI from "openai";\n\nconst client = new OpenAI({ baseURL: "${url}/v1", apiKey: process.env.ARGOSY_API_KEY ?? "none" });\nconst response = await client.${path === "completions" ? "completions" : "chat.completions"}.create(${JSON.stringify(body, null, 2)});\nconsole.log(${path === "completions" ? "response.choices[0].text" : "response.choices[0].message.content"});`,
};
// JSON as Python. Strings have the same form in both.
const toPython = (value) => JSON.stringify(value).replace(/("(?:[^"\\]|\\.)*")|\b(true|false|null)\b/g, (_, text, word) => text ?? { true: "True", false: "False", null: "None" }[word]);

function AsCode({ settings, draft }) {
  const [language, setLanguage] = useState("curl");
  const content = draft || lanes[0].value.findLast(({ role }) => role === "user")?.text || EXAMPLES[0];
  const body = buildBody(settings, [{ role: "user", content }]);
  const base = new URL(".", location.href).href.replace(/\/$/, "");
  const code = CODE[language](base, settings.mode === "chat" ? "chat/completions" : "completions", body);
  return html`<${Card} title="The same request as code" actions=${html`<button class="btn" onClick=${() => copyText(code, "The code")}>Copy</button>`}>
    <div class="seg" role="group" aria-label="Language">${Object.keys(CODE).map((name) => html`<button key=${name} aria-pressed=${name === language} onClick=${() => setLanguage(name)}>${name}</button>`)}</div>
    <pre tabindex="0" class="tail">${code}</pre><//>`;
}
