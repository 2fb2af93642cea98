"use strict";
/* The cost explorer: sliders, the table, three plots, the planner's choice. Subquad.costModel computes everything.

   The settings are in the address, as in #cost?length=4096&is_causal=true, so that a link keeps them. */

Subquad.parts.cost = (root, data) => {
  const PAUSE = 250; // milliseconds without a change before what takes longer is computed
  const MAX_SHOWN_ERROR = 10;
  const { element } = Subquad;
  const { Settings, machine, ...model } = Subquad.costModel;
  const names = Object.keys(data.start);
  const sliderOf = Object.fromEntries(data.sliders.map((slider) => [slider.name, slider]));
  const [lengths, ranges] = [sliderOf.length.values.filter((_, i) => i % 2 === 0), sliderOf.logit_range.values];
  const within = { within: "within the allowed error", above: "above the allowed error", measure: "measure it" };
  const [choice, reason, command, caption, body] =
    [".choice", ".reason", ".command", "caption", "tbody"].map((place) => root.querySelector(place));
  const plots = {};
  let settings = { ...data.start };

  /* Settings and the address */

  const nearest = (values, wanted) => values.reduce((best, value) =>
    Math.abs(value - wanted) < Math.abs(best - wanted) ? value : best);

  const read = () => {
    const [place, query] = location.hash.slice(1).split("?");
    if (place !== "cost" || query === undefined) return false;
    const given = new URLSearchParams(query);
    for (const name of names) {
      const text = given.get(name);
      if (name in sliderOf) {
        const wanted = text === null || text === "" ? NaN : Number(text);
        settings[name] = Number.isNaN(wanted) ? data.start[name] : nearest(sliderOf[name].values, wanted);
      } else {
        settings[name] = text === null ? data.start[name] : text === "true";
      }
    }
    return true;
  };

  const write = () => history.replaceState(null, "", `#cost?${new URLSearchParams(settings)}`);

  /* Controls */

  const shown = (value) => value.toLocaleString("en-US");
  const compact = (value) => {
    const [unit, letter] = value >= 1e6 && value % 1e5 === 0 ? [1e6, "M"] : value >= 1e3 && value % 1e3 === 0 ? [1e3, "k"] : [1, ""];
    return shown(value / unit) + letter;
  };

  const makeSlider = ({ name, label, values }) => {
    const input = element("input", { type: "range", id: `cost-${name}`, name, min: 0, max: values.length - 1, step: 1 });
    const output = element("output", { htmlFor: input.id });
    const show = () => {
      input.value = values.indexOf(settings[name]);
      output.textContent = shown(settings[name]);
      input.setAttribute("aria-valuetext", output.textContent);
    };
    input.addEventListener("input", () => change(name, values[Number(input.value)]));
    return { show, made: element("div", {}, element("label", { htmlFor: input.id }, label), output, input) };
  };

  const makeSwitch = ({ name, label }) => {
    const input = element("input", { type: "checkbox", id: `cost-${name}`, name });
    const show = () => (input.checked = settings[name]);
    input.addEventListener("change", () => change(name, input.checked));
    return { show, made: element("div", { className: "switch" }, input, element("label", { htmlFor: input.id }, label)) };
  };

  const controls = [...data.sliders.map(makeSlider), ...data.switches.map(makeSwitch)];
  const again = element("button", { type: "button" }, "Reset");
  again.addEventListener("click", () => {
    settings = { ...data.start };
    schedule();
    write(); // last: a browser may refuse many changes of the address in a short time
  });
  const form = root.querySelector(".cost-controls");
  form.append(...controls.map(({ made }) => made), again);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.hidden = false;

  function change(name, value) {
    settings[name] = value;
    schedule();
    write(); // last: a browser may refuse many changes of the address in a short time
  }

  /* What is shown */

  const now = (changes = {}) => Settings.$new(...names.map((name) => ({ ...settings, ...changes })[name]));

  const fillTable = (measured, from = null) => {
    const exact = measured[0].seconds;
    const rows = measured.map((row, i) => element("tr", {},
      element("td", {}, row.name),
      element("td", { className: "number" }, model.duration(row.seconds)),
      element("td", { className: "number" }, `${model.short(exact / row.seconds)} x`),
      element("td", { className: "number" }, from ? model.length_text(from[i]) : "…"),
      element("td", { className: "number" }, model.mebibytes(row.peak_bytes)),
      element("td", {}, row.error.__str__(), element("br"),
        element("small", { className: { within: "good", above: "bad" }[row.verdict] ?? "" }, within[row.verdict]))));
    body.replaceChildren(...rows);
    caption.textContent = `One method of each kind, ${settings.is_causal ? "causal" : "full"} attention over ` +
      `${shown(settings.length)} tokens, ${settings.heads} heads of width ${settings.width} and value width ` +
      `${settings.value_width}, logits within ±${settings.logit_range}` +
      `${settings.training ? ", forward and backward" : ""}.`;
  };

  const draw = (name, spec) => {
    const place = root.querySelector(`[data-plot="${name}"]`);
    if (plots[name]) plots[name].update(spec);
    else plots[name] = Subquad.plot(place, spec);
  };

  const drawByLength = (measured) => {
    const at = [...new Set([...lengths, settings.length])].sort((a, b) => a - b);
    const curves = at.map((length) => (length === settings.length ? measured : model.measures_at(now({ length }), machine)));
    const series = (value) => measured.map((row, i) =>
      ({ name: row.name, color: i + 1, x: at, y: curves.map((rows) => value(rows[i])) }));
    const x = { label: "length", log: true, mark: settings.length, format: compact };
    draw("seconds", { title: "Time of one call", x, y: { label: "time", log: true, format: model.duration },
      series: series((row) => row.seconds) });
    draw("bytes", { title: "Peak memory above the inputs", x, y: { label: "memory, MiB", log: true },
      series: series((row) => row.peak_bytes / 2 ** 20) });
  };

  const drawErrors = (measured) => {
    const errors = model.errors_by_range(now(), ranges);
    const y = (i) => errors.map((row) => (row[i] !== null && row[i] > 0 && row[i] <= MAX_SHOWN_ERROR ? row[i] : null));
    const known = measured.map((row, i) => ({ name: row.name.replace(/, scale=.*(?=\))/, ", best scale"), color: i + 1, x: ranges, y: y(i) }));
    const allowed = { name: "allowed error", color: 8, x: ranges, y: ranges.map(() => settings.max_error) };
    const series = [allowed, ...known.filter((line, i) => measured[i].error.relative > 0)];
    const x = { label: "logit range", log: true, mark: settings.logit_range };
    draw("error", { title: "Predicted error", x, y: { label: "relative error", log: true }, series });
  };

  const redraw = () => {
    performance.mark("cost-redraw");
    for (const { show } of controls) show();
    const measured = model.measures_at(now(), machine);
    fillTable(measured);
    drawByLength(measured);
    drawErrors(measured);
    const { name } = model.choice_at(now(), machine);
    if (choice.textContent !== name) [choice.textContent, reason.textContent] = [name, ""];
    command.textContent = `subquad plan --length ${settings.length} --heads ${settings.heads} --head-dim ${settings.width} ` +
      `--value-dim ${settings.value_width} --logit-range ${settings.logit_range} --max-error ${settings.max_error} ` +
      `--causal ${settings.is_causal} --training ${settings.training}`;
    performance.measure("cost-redraw", "cost-redraw");
    return measured;
  };

  /** The reason may compare methods at all lengths: it waits until the reader pauses. */
  const explain = (measured) => {
    const plan = model.plan_at(now(), machine);
    reason.textContent = plan.reason.slice(plan.choice.name.length + 2);
    fillTable(measured, model.faster_from(now(), machine));
    root.dataset.explained = ""; // for the tests: nothing is left to compute
  };

  let frame = null;
  let pause = null;
  function schedule() {
    clearTimeout(pause);
    delete root.dataset.explained;
    frame ??= requestAnimationFrame(() => {
      frame = null;
      const measured = redraw();
      pause = setTimeout(() => explain(measured), PAUSE);
    });
  }

  addEventListener("hashchange", () => read() && schedule());
  if (read()) root.scrollIntoView();
  schedule();
};
