"use strict";
/* The head explorer: choose a head, a query and a method; see the weights, what is read, and the errors.

   The row is drawn at once. Errors of whole heads take longer, so they are computed one method at a time, and kept. */

(() => {
  const { element } = Subquad;
  const { group, radio, scrolled, slider } = Subquad.controls;
  const { APPROXIMATED, EXACT, UNSEEN, bytes, error, floats, methods, output, outputs } = Subquad.headMethods;
  const { CLOSE, largestOf, percent, reasons } = Subquad.headReasons;
  const HOW = { [EXACT]: "read exactly", [APPROXIMATED]: "approximated", [UNSEEN]: "not read" };
  const LISTED_KEYS = 6;
  const LABELS = {
    exact: () => "Exact()",
    multipole: (own, usual) => {
      const changed = Object.keys(own).filter((name) => own[name] !== usual[name]);
      return `Multipole(${changed.map((name) => `${name}=${own[name]}`).join(", ")})`;
    },
    window: ({ size, sinks }) => `Window(${size}${sinks ? `, sinks=${sinks}` : ""})`,
    taylor: ({ degree }) => `Taylor(${degree})`,
    random: ({ features }) => `RandomFeatures(${features}, 'positive')`,
    elu: () => "Linear('elu')",
    separable: () => "Separable()",
  };
  const RANGES = {
    size: { text: "window", min: 1, max: 512 }, sinks: { text: "sinks", min: 0, max: 16 },
    degree: { text: "degree", min: 1, max: 8 }, features: { text: "features", min: 16, max: 256, step: 16 },
    window: { text: "window", min: 1, max: 256 }, top: { text: "top blocks", min: 0, max: 32 },
    block: { text: "block size", options: [4, 8, 16] },
  };
  const ABOUT = {
    local: "looks at the last few tokens", sink: "rests on the first token",
    induction: "looks for what came next the last time", diffuse: "looks everywhere at once",
  };

  class Explorer {
    constructor(root, data) {
      this.data = data;
      this.n = data.tokens.length;
      this.heads = [];
      this.known = new Map(); // errors of whole heads
      this.kept = {}; // methods that are prepared
      this.settings = Object.fromEntries(Object.entries(data.methods).map(([name, own]) => [name, { ...own.settings }]));
      this.at = { head: data.start.head, row: data.start.row, method: "multipole" };
      this.place = root.querySelector("[data-place=explorer]");
      this.build();
      this.place.hidden = false;
      const observer = new IntersectionObserver((seen) => {
        if (!seen.some((each) => each.isIntersecting)) return;
        observer.disconnect();
        this.draw();
      });
      observer.observe(this.place);
      addEventListener("beforeprint", () => {
        if (!this.shown) this.draw();
        while (this.fillError());
      });
    }

    // ---- what is computed

    head() {
      this.buffer ??= bytes(this.data.tensors);
      this.projections ??= floats(this.data.projections);
      return (this.heads[this.at.head] ??= Subquad.headMethods.head(this.buffer, this.at.head, this.n, this.data.width));
    }

    /** Return the method on the chosen head. Some prepare all keys, so each is kept until its settings change. */
    method(name) {
      const key = this.key(name), kept = this.kept[name];
      if (kept?.key === key) return kept.method;
      const method = methods[name](this.head(), { ...this.settings[name], projections: this.projections });
      this.kept[name] = { key, method };
      return method;
    }

    name(j) {
      return `“${this.data.tokens[j].trim() || "line break"}” (token ${j})`;
    }

    row(name, exact) {
      const head = this.head(), i = this.at.row, found = this.method(name)(i);
      const off = error(output(head, found.weights), output(head, exact));
      return { ...found, head, i, exact, settings: this.settings[name], error: off, name: (j) => this.name(j) };
    }

    key(name) {
      return JSON.stringify([this.at.head, name, this.settings[name]]);
    }

    /** Compute the errors of the whole head, a method at a time, so that the page stays responsive. */
    fillErrors() {
      clearTimeout(this.waiting);
      this.waiting = setTimeout(() => this.fillError() && this.fillErrors(), 60);
    }

    /** Compute one that is not known yet, that of the chosen method first; return whether there was one. */
    fillError() {
      const missing = [this.at.method, ...Object.keys(methods)].find((name) => !this.known.has(this.key(name)));
      if (missing === undefined) return false;
      const head = this.head();
      head.exact ??= outputs(head, this.method("exact"));
      this.known.set(this.key(missing), error(outputs(head, this.method(missing)), head.exact));
      this.showErrors();
      return true;
    }

    // ---- what is built once

    build() {
      this.texts = { exact: this.text("Text shaded by exact weights"), method: this.text("Text shaded by the method's weights") };
      this.methodTitle = element("h4");
      this.reason = element("p", { className: "head-reason" });
      this.reason.setAttribute("role", "status");
      this.hover = element("output", { className: "head-hover" });
      this.list = element("tbody");
      const columns = ["key", "exact weight", "method's weight", "how"].map((text, i) =>
        element("th", { scope: "col", className: i === 1 || i === 2 ? "number" : "" }, text));
      this.place.replaceChildren(
        element("div", { className: "head-controls" }, this.buildKinds(), this.buildQuery(), this.buildMethods(), this.buildSettings()),
        this.reason,
        element("div", { className: "head-texts" },
          element("div", { className: "head-exact" }, element("h4", {}, "Exact attention"), this.texts.exact.box),
          element("div", {}, this.methodTitle, this.texts.method.box)),
        this.hover, this.legend(),
        scrolled("Keys with the most weight", element("table", {},
          element("caption", {}, "Keys with the most weight"), element("thead", {}, element("tr", {}, ...columns)), this.list)),
      );
    }

    buildKinds() {
      const choices = this.data.heads.map((head, i) => radio("head-kind", head.kind, i === this.at.head, () => {
        this.at.head = i;
        this.draw();
      }, element("small", {}, `${ABOUT[head.kind] ?? ""} (layer ${head.layer}, head ${head.head})`)));
      return group("Head", element("div", { className: "head-kinds" }, ...choices));
    }

    buildQuery() {
      this.query = slider("query", { min: 0, max: this.n - 1, value: this.at.row }, (value) => this.choose(value));
      return group("Query: the token that asks", this.query.line,
        element("p", { className: "note" }, "Move the slider with the arrow keys, or click a token of the text."));
    }

    buildMethods() {
      this.cells = {};
      const rows = Object.keys(this.settings).map((name) => {
        const label = element("span", {}, this.label(name));
        const numbers = Array.from({ length: 5 }, () => element("td", { className: "number" }));
        this.cells[name] = { label, numbers };
        const choice = radio("head-method", label, name === this.at.method, () => {
          this.at.method = name;
          this.fillSettings();
          this.draw();
        });
        return element("tr", {}, element("td", {}, choice), ...numbers);
      });
      const titles = ["method", "error of the row", "error of the head", "keys read", "approximated", "not read"];
      const header = titles.map((text, i) => element("th", { scope: "col", className: i ? "number" : "" }, text));
      return group("Method", scrolled("Methods", element("table", { className: "head-methods" },
        element("thead", {}, element("tr", {}, ...header)), element("tbody", {}, ...rows))));
    }

    buildSettings() {
      this.settingsPlace = element("div");
      this.fillSettings();
      return group("Settings of the method", this.settingsPlace);
    }

    fillSettings() {
      const own = this.settings[this.at.method];
      const lines = Object.keys(own).map((name) => {
        const change = (value) => {
          own[name] = value;
          this.draw();
        };
        return slider(RANGES[name].text, { ...RANGES[name], value: own[name] }, change).line;
      });
      this.settingsPlace.replaceChildren(...(lines.length ? lines : [element("p", { className: "note" }, "This method has none.")]));
    }

    text(label) {
      const tokens = this.data.tokens.map((token, j) => {
        const span = element("span", {}, token);
        span.dataset.token = j;
        return span;
      });
      const box = element("div", { className: "head-text", tabIndex: 0 }, ...tokens);
      box.setAttribute("role", "region");
      box.setAttribute("aria-label", label);
      box.addEventListener("click", (event) => event.target.dataset.token && this.choose(Number(event.target.dataset.token)));
      box.addEventListener("mouseover", (event) => event.target.dataset.token && this.point(Number(event.target.dataset.token)));
      box.addEventListener("scroll", () => {
        for (const other of Object.values(this.texts)) if (other.box.scrollTop !== box.scrollTop) other.box.scrollTop = box.scrollTop;
      });
      return { box, tokens };
    }

    legend() {
      const marks = [["w", "weight"], ["1", HOW[EXACT]], ["2", HOW[APPROXIMATED]]].map(([mark, text]) =>
        element("li", {}, element("span", { className: `mark mark-${mark}` }, "\u00a0"), text));
      return element("ul", { className: "head-legend" }, ...marks, element("li", {}, "gray: not read, or later than the query"));
    }

    // ---- what is drawn again

    choose(row) {
      this.at.row = row;
      this.query.set(row);
      this.draw();
    }

    draw() {
      const begin = performance.now();
      const exact = this.method("exact")(this.at.row);
      this.exactRow = exact;
      for (const name of Object.keys(this.settings)) this.drawMethod(name, exact.weights);
      const top = this.drawList(exact.weights);
      this.shade(this.texts.exact, exact);
      this.shade(this.texts.method, this.shown);
      this.scrollTo(top);
      this.methodTitle.textContent = this.label(this.at.method);
      this.reason.replaceChildren(element("strong", {}, this.verdict()), " ", reasons[this.at.method](this.shown));
      this.query.show(`${this.at.row}: ${this.data.tokens[this.at.row].trim() || "line break"}`);
      this.showErrors();
      this.fillErrors();
      this.place.dataset.milliseconds = (performance.now() - begin).toFixed(1);
    }

    label(name) {
      return LABELS[name](this.settings[name], this.data.methods[name].settings);
    }

    verdict() {
      const { error } = this.shown, label = this.label(this.at.method);
      if (this.at.method === "exact") return "Where does this head look?";
      return error < CLOSE ? `Why is ${label} close in this row?` : `Why is ${label} wrong in this row, by ${percent(error)}?`;
    }

    drawMethod(name, exact) {
      const row = this.row(name, exact), { label, numbers } = this.cells[name];
      if (name === this.at.method) this.shown = row;
      label.textContent = this.label(name);
      [EXACT, APPROXIMATED, UNSEEN].forEach((how, c) => {
        numbers[2 + c].textContent = row.seen.reduce((total, own) => total + (own === how), 0);
      });
      numbers[0].textContent = row.error.toFixed(3);
    }

    showErrors() {
      for (const [name, { numbers }] of Object.entries(this.cells))
        numbers[1].textContent = this.known.get(this.key(name))?.toFixed(3) ?? "…";
    }

    /** List the keys with the most weight in both; return the first that is not a sink. */
    drawList(exact) {
      const { weights, seen } = this.shown, most = (j) => Math.max(exact[j], Math.abs(weights[j]));
      const keys = [...exact.keys()].sort((a, b) => most(b) - most(a)).slice(0, LISTED_KEYS);
      this.list.replaceChildren(...keys.map((j) => element("tr", {}, element("td", {}, this.name(j)),
        element("td", { className: "number" }, percent(exact[j])), element("td", { className: "number" }, percent(weights[j])),
        element("td", {}, HOW[seen[j]]))));
      return largestOf(exact.map((weight, j) => (j === 0 ? 0 : weight)));
    }

    shade({ tokens }, { weights, seen }) {
      const largest = weights.reduce((most, weight) => Math.max(most, Math.abs(weight)), 0);
      tokens.forEach((span, j) => {
        const weight = weights[j] ?? 0;
        span.style.setProperty("--strength", Math.sqrt(Math.abs(weight) / (largest || 1)).toFixed(3));
        const how = j < weights.length ? `seen-${seen[j]}` : "later";
        span.className = `${how}${weight < 0 ? " negative" : ""}${j === this.at.row ? " query" : ""}`;
      });
    }

    /** Scroll the boxes, not the page, to a token. */
    scrollTo(j) {
      const { box, tokens } = this.texts.exact;
      box.scrollTop = tokens[j].offsetTop - box.clientHeight / 2;
    }

    point(j) {
      const { weights, seen } = this.shown;
      this.hover.textContent = j >= weights.length ? `${this.name(j)}: later than the query`
        : `${this.name(j)}: exact ${percent(this.exactRow.weights[j])}, ${this.label(this.at.method)} ${percent(weights[j])}, ${HOW[seen[j]]}`;
    }
  }

  Subquad.parts.head = (root, data) => new Explorer(root, data);
})();
