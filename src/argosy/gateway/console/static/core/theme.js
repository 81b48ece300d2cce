// Light or dark, as the browser prefers or the person chose.
import { effect, signal } from "../vendor.js";

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const stored = localStorage.getItem("argosy-theme");
export const isDark = signal(stored ? stored === "dark" : prefersDark.matches);

prefersDark.addEventListener("change", (event) => {
  if (!localStorage.getItem("argosy-theme")) isDark.value = event.matches;
});
effect(() => document.documentElement.classList.toggle("dark", isDark.value));

export function toggleTheme() {
  isDark.value = !isDark.value;
  localStorage.setItem("argosy-theme", isDark.value ? "dark" : "light");
}

export const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
