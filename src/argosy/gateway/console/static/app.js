// The shell: signs in, shows the navigation, and loads the screen that the address names.
import { html, render, useEffect, useRef, useState } from "./vendor.js";
import { get, may, session, call } from "./core/api.js";
import { partOf } from "./core/format.js";
import { connection, isOutdated, retryAt, tick } from "./core/live.js";
import { link, route } from "./core/router.js";
import { isDark, toggleTheme } from "./core/theme.js";
import { isUtc, toggleUtc, zoneName } from "./core/time-zone.js";
import { Card, Notices, Pill, Skeleton } from "./ui/parts.js";
import { SignIn } from "./ui/sign-in.js";

const always = () => true;
const SCREENS = [
  { id: "overview", title: "Overview", group: "Watch", isShown: () => may("viewer", "gateway") },
  { id: "alerts", title: "Alerts", group: "Watch", isShown: () => may("viewer", "gateway") },
  { id: "incidents", title: "Incidents", group: "Watch", isShown: () => may("viewer", "gateway") },
  { id: "requests", title: "Requests", group: "Watch", isShown: always },
  { id: "usage", title: "Usage and cost", group: "Watch", isShown: always },
  { id: "objectives", title: "Objectives", group: "Watch", isShown: () => may("viewer", "gateway") },
  { id: "events", title: "Events and audit", group: "Watch", isShown: () => may("viewer") },
  { id: "quality", title: "Quality", group: "Watch", isShown: () => may("viewer") },
  { id: "playground", title: "Playground", group: "Use", isShown: always },
  { id: "files", title: "Files", group: "Use", isShown: always },
  { id: "learn", title: "Learn", group: "Use", isShown: always },
  { id: "models", title: "Models and replicas", group: "Run", isShown: () => may("viewer", "gateway") },
  { id: "routing", title: "Routing", group: "Run", isShown: () => may("viewer", "gateway") },
  { id: "flags", title: "Flags and caches", group: "Run", isShown: () => may("viewer", "gateway") },
  { id: "prompts", title: "Prompts", group: "Run", isShown: () => may("viewer") },
  { id: "tenants", title: "Tenants and keys", group: "Run", isShown: () => may("viewer") },
  { id: "settings", title: "Settings and doctor", group: "Run", isShown: () => may("viewer", "gateway") },
];

function useScreen(id) {
  const [loaded, setLoaded] = useState({});
  useEffect(() => {
    let isCurrent = true;
    import(`./screens/${id}.js`).then(
      (module) => isCurrent && setLoaded({ id, Screen: module.default }),
      () => isCurrent && setLoaded({ id, hasFailed: true }),
    );
    return () => { isCurrent = false; };
  }, [id]);
  return loaded.id === id ? loaded : {};
}

// State of the event stream, which is not that of the fleet.
function LiveState() {
  if (connection.value === "live") return html`<${Pill} kind="none">Updates live<//>`;
  return connection.value === "lost" ? html`<${Pill} kind="bad">Connection lost<//>` : html`<${Pill} kind="none">Connecting<//>`;
}

function Banner() {
  const [now, setNow] = useState(Date.now());
  const isLost = connection.value === "lost";
  useEffect(() => {
    if (!isLost) return undefined;
    const timer = setInterval(() => setNow(Date.now()), 500);
    return () => clearInterval(timer);
  }, [isLost]);
  if (isOutdated.value) return html`<div class="banner" role="status">The gateway has a newer console. <button class="btn" onClick=${() => location.reload()}>Reload</button></div>`;
  if (!isLost) return null;
  const wait = Math.max(0, Math.ceil((retryAt.value - now) / 1000));
  return html`<div class="banner" role="status">The connection to the gateway is lost. What you see may be old. ${wait ? `The next try is in ${wait} s.` : "Connecting."}</div>`;
}

function Navigation({ screens, current }) {
  const groups = [...new Set(screens.map(({ group }) => group))];
  const bar = useRef(null);
  useEffect(() => { // on narrow pages the bar scrolls, and shows the present screen in its middle
    const element = bar.current;
    const observer = new ResizeObserver(() => {
      const shown = element.querySelector("[aria-current]");
      if (shown) element.scrollLeft = shown.offsetLeft - (element.clientWidth - shown.offsetWidth) / 2;
    });
    observer.observe(element);
    return () => observer.disconnect();
  }, [current]);
  return html`<nav class="side" aria-label="Screens" ref=${bar}><a class="brand" href="#/">Argosy</a>${groups.map((group) => html`
    <div key=${group}><div class="g">${group}</div>${screens.filter((screen) => screen.group === group).map(({ id, title }) => html`
      <a key=${id} href=${link(id)} aria-current=${id === current ? "page" : undefined}>${title}</a>`)}</div>`)}
    <div class="who"><div class="s">${who()}</div>
      <button class="link" onClick=${toggleTheme}>${isDark.value ? "Light theme" : "Dark theme"}</button>
      ${session.value.is_local ? null : html`<button class="link" onClick=${signOut}>Sign out</button>`}</div></nav>`;
}

function who() {
  const { role, scope, is_local: isLocal, key, user } = session.value;
  if (isLocal) return "This machine needs no key";
  return `${key ?? user}, ${role}${scope === "gateway" ? " of the gateway" : ""}`;
}

async function signOut() {
  await call("DELETE", "console/session").catch(() => {});
  session.value = null;
}

function Replicas() {
  const states = tick.value?.replicas;
  if (!states) return null;
  const present = Object.values(states).reduce((sum, value) => sum + value, 0);
  const total = present + (tick.value.missing_replicas ?? 0);
  return html`<span class="s">${partOf(states.ready ?? 0, total, "replica")} ready</span>`;
}

const Zone = () => html`<span class="s">Times in ${zoneName()} <button class="link" onClick=${toggleUtc}>${isUtc.value ? "Use local time" : "Use UTC"}</button></span>`;

function Shell() {
  const { screen } = route.value;
  const screens = SCREENS.filter(({ isShown }) => isShown());
  const chosen = screens.find(({ id }) => id === screen) ?? (screen === "overview" ? screens[0] : undefined);
  const { Screen, hasFailed } = useScreen(chosen?.id ?? screens[0].id);
  const title = chosen?.title ?? "Not found";
  useEffect(() => { document.title = `${title} · Argosy`; }, [title]);
  return html`<div class="app"><a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.getElementById("main").focus(); }}>Skip to the content</a>
    <${Navigation} screens=${screens} current=${chosen?.id} />
    <div><header class="top"><h1>${title}</h1><${LiveState} /><${Replicas} /><span class="sp"></span><${Zone} /></header><${Banner} />
      <main id="main" tabindex="-1">${!chosen
        ? html`<${Card} title="There is no such screen"><p>The address may be wrong, or your role does not see it. <a href="#/">Open the first screen</a></p><//>`
        : hasFailed ? html`<${Card} title="The screen could not be loaded"><p>The gateway may have been upgraded. <button class="btn" onClick=${() => location.reload()}>Reload</button></p><//>`
        : Screen ? html`<${Screen} key=${chosen.id} />` : html`<${Skeleton} height=${200} />`}</main></div>
    <${Notices} /></div>`;
}

const USE_INTERVAL_MS = 300_000;

function App() {
  useEffect(() => {
    get("console/session").then((answer) => { session.value = answer; }, () => { session.value = null; });
    // A visible window uses its session, also on a screen that reads nothing. The event stream does not count as use.
    const timer = setInterval(() => {
      if (session.value && !document.hidden) get("console/session").catch(() => {});
    }, USE_INTERVAL_MS);
    return () => clearInterval(timer);
  }, []);
  if (session.value === undefined) return html`<${Skeleton} height=${200} />`;
  return session.value ? html`<${Shell} />` : html`<${SignIn} />`;
}

render(html`<${App} />`, document.getElementById("app"));
