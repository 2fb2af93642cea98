"use strict";
/* The last script: starts every part, and runs what belongs to the whole page. */

(() => {
  const root = document.documentElement;
  const announce = () => document.dispatchEvent(new Event("themechange"));

  const setTheme = (theme) => {
    if (theme) root.dataset.theme = theme;
    else delete root.dataset.theme;
    announce();
  };

  const toggle = document.getElementById("theme");
  toggle.hidden = false;
  toggle.addEventListener("click", () => setTheme(Subquad.isDark() ? "light" : "dark"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", announce);

  /* A link to a section opens it, and the sections around it. Only the name at the start of the fragment counts; a part may
     keep settings after it. */
  const openTarget = (fragment) => {
    const target = document.getElementById(fragment.slice(1).match(/^[\w-]*/)[0]);
    const closed = target?.querySelector(":scope > details") ?? target;
    for (let each = closed; each; each = each.parentElement) if (each.matches("details")) each.open = true;
  };
  addEventListener("hashchange", () => openTarget(location.hash));
  document.addEventListener("click", (event) => { // The address does not change if it is already that of the link.
    const link = event.target.closest("a[href^='#']");
    if (link) openTarget(link.hash);
  });
  openTarget(location.hash);

  /* Paper is light and cannot be unfolded. */
  let before = null;
  addEventListener("beforeprint", () => {
    const closed = [...document.querySelectorAll("details.printed:not([open])")];
    before = { theme: root.dataset.theme, closed };
    for (const each of closed) each.open = true;
    setTheme("light");
  });
  addEventListener("afterprint", () => {
    for (const each of before?.closed ?? []) each.open = false;
    setTheme(before?.theme);
  });

  for (const section of document.querySelectorAll("[data-part]")) {
    const name = section.dataset.part;
    const data = document.getElementById(`data-${name}`);
    Subquad.parts[name]?.(section, JSON.parse(data.textContent));
  }
  root.dataset.ready = String(Math.round(performance.now())); // milliseconds since the page was opened, for its tests
})();
