"use strict";
/* Controls that the explorers share: groups, choices, sliders, and tables that scroll by themselves. */

Subquad.controls = (() => {
  const { element } = Subquad;

  function group(title, ...children) {
    return element("fieldset", {}, element("legend", {}, title), ...children);
  }

  /** A region that scrolls sideways, also with the keyboard. */
  function scrolled(label, table) {
    const box = element("div", { className: "scroll", tabIndex: 0 }, table);
    box.setAttribute("role", "region");
    box.setAttribute("aria-label", label);
    return box;
  }

  function radio(name, label, checked, choose, ...more) {
    const input = element("input", { type: "radio", name, checked });
    input.addEventListener("change", choose);
    return element("label", {}, input, " ", label, ...more);
  }

  /** A line with a label, a range or a choice among options, and its value; `show` writes another text there. */
  function slider(text, { options, value, min, max, step = 1 }, change) {
    const input = options ? element("select", {}, ...options.map((option) => element("option", { value: option }, String(option))))
      : element("input", { type: "range", min, max, step });
    input.value = value;
    const shown = element("output", {}, options ? "" : String(value));
    input.addEventListener("input", () => {
      if (!options) shown.textContent = input.value;
      change(Number(input.value));
    });
    const line = element("label", { className: "slider" }, element("span", {}, text), input, shown);
    return { line, set: (next) => { input.value = next; }, show: (next) => { shown.textContent = next; } };
  }

  return { group, radio, scrolled, slider };
})();
