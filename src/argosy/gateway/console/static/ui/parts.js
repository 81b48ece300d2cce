// Parts that all screens share: cards with their states, pills, fields, and buttons that report what they did.
import { html, signal, useEffect, useState } from "../vendor.js";
import { visible } from "../core/format.js";

const MARKS = { ok: "●", warn: "◆", bad: "▲", none: "○" };

// A state by colour, mark and word, so that it does not depend on colour.
export const Pill = ({ kind, children }) => html`<span class=${`pill ${kind}`}><span aria-hidden="true">${MARKS[kind]}</span>${children}</span>`;

const STATUS_KINDS = { ready: "ok", starting: "warn", pending: "warn", loading: "warn", warming: "warn", out_of_service: "none", sleeping: "none", draining: "warn", cordoned: "warn", degraded: "warn", completed: "ok", stopped: "ok", cancelled: "none", interrupted: "bad", failed: "bad", refused: "warn" };
export const Status = ({ value }) => html`<${Pill} kind=${STATUS_KINDS[value] ?? "bad"}>${value.replaceAll("_", " ")}<//>`;

// Content of a resource, or its state: loading, failed, or old after a failure.
export function Resource({ of: resource, empty, isEmpty = (data) => data.data?.length === 0, height = 72, children }) {
  const { data, error, at } = resource;
  if (data === undefined && error) return html`<${Failure} resource=${resource} />`;
  if (data === undefined) return html`<${Skeleton} height=${height} />`;
  const content = empty && isEmpty(data) ? html`<p class="empty">${empty}</p>` : children(data);
  if (!error) return content;
  return html`<div class="stale"><p class="note" role="status"><${Pill} kind="warn">${Math.round((Date.now() - at) / 1000)} s old<//>
    ${" "}${error.message} The last values stay. <button class="btn" onClick=${resource.reload}>Try again</button></p>${content}</div>`;
}

function Failure({ resource }) {
  const { error, tries, reload } = resource;
  return html`<div class="failure" role="alert"><p>${error.message}${error.code ? html` <code>${error.code}</code>` : null}
    ${tries > 1 ? ` Tried ${tries} times.` : ""}</p><button class="btn" onClick=${reload}>Try again</button></div>`;
}

// Shown after a moment, so that fast answers do not flicker. It has the height of the content.
export function Skeleton({ height }) {
  const [isLate, setLate] = useState(false);
  useEffect(() => {
    const timer = setTimeout(() => setLate(true), 150);
    return () => clearTimeout(timer);
  }, []);
  return html`<div style=${{ minHeight: `${height}px` }} role="status" aria-busy="true" aria-label="Loading">
    ${isLate ? html`<div><div class="skel wide"></div><div class="skel"></div></div>` : null}</div>`;
}

export const Card = ({ title, note, actions, children, class: name = "" }) => html`
  <section class=${`card ${name}`}>${title
    ? html`<div class="hd"><h2>${title}</h2>${note ? html`<span class="s">${note}</span>` : null}<span class="sp"></span>${actions}</div>`
    : null}${children}</section>`;

export const Field = ({ label, hint, children }) => html`<label class="field"><span>${label}</span>${children}${hint ? html`<small>${hint}</small>` : null}</label>`;

export function Select({ label, value, options, onChange }) {
  return html`<${Field} label=${label}><select value=${value} onChange=${(event) => onChange(event.target.value)}>
    ${options.map(([key, text]) => html`<option key=${key} value=${key} selected=${key === value}>${text}</option>`)}</select><//>`;
}

export const Name = ({ value, class: name = "" }) => html`<code class=${name}>${visible(value)}</code>`;

const notices = signal([]);
let lastNotice = 0;

export function notify(text, kind = "ok") {
  const id = (lastNotice += 1);
  notices.value = [...notices.value, { id, text, kind }];
  setTimeout(() => { notices.value = notices.value.filter((notice) => notice.id !== id); }, 6000);
}

export const Notices = () => html`<div class="notices" role="status">${notices.value.map(({ id, text, kind }) => html`
  <div key=${id} class=${`notice ${kind}`}>${text}</div>`)}</div>`;

// A button that runs an action once, and shows its error.
export function Action({ run, done, confirm, kind = "", children }) {
  const [isBusy, setBusy] = useState(false);
  const act = async () => {
    if (confirm && !window.confirm(confirm)) return;
    setBusy(true);
    try {
      await run();
      if (done) notify(done);
    } catch (error) {
      notify(error.message, "bad");
    }
    setBusy(false);
  };
  return html`<button type="button" class=${`btn ${kind}`} disabled=${isBusy} onClick=${act}>${children}</button>`;
}

export async function copyText(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    notify(`${what} copied.`);
  } catch {
    notify("The browser does not allow to copy here. Select the text and copy it.", "warn");
  }
}

// Offers text as a file. Cells that a spreadsheet would run as a formula get a quote.
export function saveCsv(name, header, rows) {
  const cell = (value) => {
    const text = String(value ?? "");
    const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
    return /[",\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  save(name, new Blob([[header, ...rows].map((row) => row.map(cell).join(",")).join("\n")], { type: "text/csv" }));
}

export function save(name, blob) {
  const anchor = document.createElement("a");
  anchor.href = URL.createObjectURL(blob);
  anchor.download = name;
  anchor.click();
  URL.revokeObjectURL(anchor.href);
}
