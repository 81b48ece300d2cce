// Playground: a chat or a completion that streams, with its speed, its cost, and the same request as code.
import { html, signal, useEffect, useRef, useState } from "../vendor.js";
import { ApiError, call, useResource } from "../core/api.js";
import { count, duration, significant, visible } from "../core/format.js";
import { link, route, setQuery } from "../core/router.js";
import { Card, Field, Resource, Select, copyText } from "../ui/parts.js";

const MAX_TURNS = 200;
const turns = signal([]); // kept while other screens are open
const EXAMPLES = ["Write a short poem about the sea.", "Explain what a KV cache is in two sentences.", "List three prime numbers."];

export default function Playground() {
  const models = useResource("console/v1/models");
  return html`<${Resource} of=${models} empty="No model is served. Start a replica, or ask for access to a model.">${({ data }) => html`<${Chat} models=${data.map(({ id }) => id)} />`}<//>`;
}

function Chat({ models }) {
  const { query } = route.value;
  const model = models.includes(query.model) ? query.model : models[0];
  const mode = query.mode === "completion" ? "completion" : "chat";
  const settings = { model, mode, system: query.system ?? "", temperature: query.temperature ?? "", maxTokens: query.max_tokens ?? "256", probabilities: query.probabilities === "1" };
  const [running, setRunning] = useState(null);
  const [stats, setStats] = useState(null);
  const [error, setError] = useState(null);
  const [draft, setDraft] = useState("");
  const output = useRef(null);
  useEffect(() => () => running?.abort(), [running]);

  const send = async (text) => {
    const prompt = text.trim();
    if (!prompt || running) return;
    const controller = new AbortController();
    const before = mode === "chat" ? turns.value.slice(-MAX_TURNS) : [];
    const messages = [...before.filter(({ text: said }) => said).map(({ role, text: said }) => ({ role, content: said })), { role: "user", content: prompt }];
    const answer = { role: "assistant", text: "", tokens: [] };
    turns.value = [...before, { role: "user", text: prompt }, answer];
    setDraft("");
    setError(null);
    setStats(null);
    setRunning(controller);
    try {
      const body = buildBody(settings, messages);
      const result = await readStream(mode, body, controller.signal, (delta, probabilities) => {
        answer.text += delta;
        answer.tokens.push(...probabilities);
        scheduleDraw(output, answer);
      });
      setStats(result);
    } catch (failure) {
      if (failure.name !== "AbortError") setError(failure);
    }
    turns.value = [...turns.value.slice(0, -1), { ...answer }];
    setRunning(null);
  };
  return html`<div class="play"><div class="side-form">
    <${Card} title=${mode === "chat" ? "Chat" : "Completion"} actions=${turns.value.length ? html`<button class="btn" disabled=${Boolean(running)} onClick=${() => { turns.value = []; setStats(null); setError(null); }}>Clear</button>` : null}>
      <${Turns} isRunning=${Boolean(running)} output=${output} showsProbabilities=${settings.probabilities} send=${send} />
      ${error ? html`<p class="failure" role="alert">${error.message}</p>` : null}
      <form onSubmit=${(event) => { event.preventDefault(); send(draft); }}>
        <${Field} label="Your message"><textarea name="message" rows="3" value=${draft} onInput=${(event) => setDraft(event.target.value)}
          onKeyDown=${(event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(draft); } }}></textarea><//>
        <div class="row"><button class="btn primary" disabled=${Boolean(running)}>Send</button>
          <button type="button" class="btn" disabled=${!running} onClick=${() => running.abort()}>Stop</button>
          <span class="s">Enter sends, Shift and Enter begins a line.</span></div></form><//>
    ${stats ? html`<${Stats} stats=${stats} />` : null}
    <${AsCode} settings=${settings} draft=${draft} /></div>
    <${Settings} settings=${settings} models=${models} /></div>`;
}

// Writes to one text node for each frame, since a new page for each token would be slower than the model.
let frame = 0;
function scheduleDraw(output, answer) {
  if (frame) return;
  frame = requestAnimationFrame(() => {
    frame = 0;
    const box = output.current;
    if (!box) return;
    box.textContent = answer.text;
    const list = box.closest(".turns");
    if (list.scrollHeight - list.scrollTop - list.clientHeight < 120) list.scrollTop = list.scrollHeight;
  });
}

function Turns({ isRunning, output, showsProbabilities, send }) {
  const list = turns.value;
  if (!list.length) {
    return html`<div class="turns"><p class="empty">Nothing was sent yet. Try one of these:</p>
      <div class="row">${EXAMPLES.map((text) => html`<button key=${text} class="btn" onClick=${() => send(text)}>${text}</button>`)}</div></div>`;
  }
  return html`<div class="turns" tabindex="0" role="log" aria-label="Messages" aria-live=${isRunning ? "off" : "polite"}>${list.map((turn, index) => html`
    <div key=${index} class=${`turn ${turn.role}`}><div class="s">${turn.role === "user" ? "You" : "Model"}</div>
      ${isRunning && index === list.length - 1 ? html`<div key="stream" ref=${output}></div>`
      : showsProbabilities && turn.tokens?.length ? html`<${Probabilities} tokens=${turn.tokens} />` : html`<div key="text">${turn.text}</div>`}</div>`)}</div>`;
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
  return html`<${Card} title="This answer" actions=${html`<a href=${link("requests", [stats.id])}>Why did it take so long?</a>`}>
    <dl class="stats">${facts.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl><//>`;
}

function Settings({ settings, models }) {
  const set = (name) => (event) => setQuery({ [name]: event.target.value });
  return html`<${Card} title="Settings"><div class="side-form">
    <${Select} label="Model" value=${settings.model} options=${models.map((id) => [id, visible(id)])} onChange=${(model) => setQuery({ model })} />
    <${Select} label="Kind" value=${settings.mode} options=${[["chat", "Chat"], ["completion", "Completion"]]} onChange=${(mode) => setQuery({ mode })} />
    ${settings.mode === "chat" ? html`<${Field} label="System prompt"><textarea rows="3" value=${settings.system} onChange=${set("system")}></textarea><//>` : null}
    <${Field} label="Temperature"><input type="number" min="0" max="2" step="0.1" placeholder="of the model" value=${settings.temperature} onChange=${set("temperature")} /><//>
    <${Field} label="Maximum of tokens"><input type="number" min="1" value=${settings.maxTokens} onChange=${set("max_tokens")} /><//>
    <label class="row s"><input type="checkbox" checked=${settings.probabilities} onChange=${(event) => setQuery({ probabilities: event.target.checked ? "1" : "" })} /> Show how probable each token was</label></div><//>`;
}

function buildBody(settings, messages) {
  const body = { model: settings.model };
  if (settings.mode === "chat") body.messages = settings.system ? [{ role: "system", content: settings.system }, ...messages] : messages;
  else body.prompt = messages.at(-1).content;
  if (settings.temperature !== "") body.temperature = Number(settings.temperature);
  if (settings.maxTokens !== "") body.max_tokens = Number(settings.maxTokens);
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
const toPython = (value) => (value === true ? "True" : value === false ? "False" : JSON.stringify(value));

function AsCode({ settings, draft }) {
  const [language, setLanguage] = useState("curl");
  const content = draft || turns.value.findLast(({ role }) => role === "user")?.text || EXAMPLES[0];
  const body = buildBody(settings, [{ role: "user", content }]);
  const base = new URL(".", location.href).href.replace(/\/$/, "");
  const code = CODE[language](base, settings.mode === "chat" ? "chat/completions" : "completions", body);
  return html`<${Card} title="The same request as code" actions=${html`<button class="btn" onClick=${() => copyText(code, "The code")}>Copy</button>`}>
    <div class="seg" role="group" aria-label="Language">${Object.keys(CODE).map((name) => html`<button key=${name} aria-pressed=${name === language} onClick=${() => setLanguage(name)}>${name}</button>`)}</div>
    <pre tabindex="0" class="tail">${code}</pre><//>`;
}
