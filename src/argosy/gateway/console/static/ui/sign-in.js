// Sign-in with an API key. The key goes to the gateway once, and is kept nowhere in the browser.
import { html, useEffect, useState } from "../vendor.js";
import { get, post, session } from "../core/api.js";
import { route } from "../core/router.js";
import { Field } from "./parts.js";

// By code, since anyone can write a text into an address.
const FAILURES = {
  sign_in_failed: "The sign-in at your organisation failed. Try again; the gateway's log has the reason.",
  issuer_unavailable: "Your organisation's sign-in cannot be reached. Try again later.",
  no_project: "Your account has no project. Ask an administrator.",
  user_disabled: "Your account is disabled. Ask an administrator.",
};

export function SignIn() {
  const [error, setError] = useState(route.value.query.sign_in_error ? FAILURES[route.value.query.sign_in_error] ?? FAILURES.sign_in_failed : "");
  const [isBusy, setBusy] = useState(false);
  const [methods, setMethods] = useState({ oidc: false, key_command: "argosy keys create" });
  useEffect(() => { get("console/sign-in/methods").then(setMethods, () => {}); }, []);
  const submit = async (event) => {
    event.preventDefault();
    const field = event.currentTarget.elements.key;
    setBusy(true);
    try {
      session.value = await post("console/session", { key: field.value });
    } catch (failure) {
      setError(failure.message);
      setBusy(false);
      field.select();
    }
  };
  return html`<main class="sign-in"><form class="card" onSubmit=${submit}><h1>Sign in to Argosy</h1>
    <${Field} label="API key" hint=${`Create one with: ${methods.key_command}`}><input name="key" type="password" autocomplete="off" spellcheck=${false} required autofocus /><//>
    ${error ? html`<p class="failure" role="alert">${error}</p>` : null}
    <button class="btn primary" disabled=${isBusy}>Sign in</button>
    ${methods.oidc ? html`<a href="console/sign-in/start">Sign in with your organisation</a>` : null}</form></main>`;
}
