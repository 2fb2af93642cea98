"use strict";
/* Subquad.plot(element, spec): lines with hover values, log axes, a legend that toggles, and the values as a table.

   spec = {
     title: "...",                                  also the accessible name
     x: {label, log, format, mark}, y: {label, log, format},   log: start with a log scale; mark: draw a vertical line here
     series: [{name, x: [...], y: [...], low: [...], high: [...], color}],   low and high, if given, draw a band;
                                                    a null leaves a gap; color: 1 to 8, by default in turn
     height: 280,
   }

   Returns {update(spec), grow(series)}. uPlot draws; this file adds what a keyboard, a screen reader, paper and a dark page need. */

(() => {
  const COLORS = 8; // of page.css: --series-1 to --series-8
  const DASHES = [[], [6, 4], [2, 3]]; // solid, dashed, dotted: lines of similar color differ in this, also without colors
  const BAND_OPACITY = 0.18;
  const MAX_POINTS = 40; // A longer line has no dots.
  const { element, number } = Subquad;

  const isPositive = (lists) => lists.flat().every((value) => value === null || value > 0);
  const colorOf = (line, i) => line.color ?? (i % COLORS) + 1;
  const dashOf = (line, i) => (line.color === undefined ? i : line.color - 1) % DASHES.length;
  const hasPoints = (line) => line.x.length < MAX_POINTS;
  const bandOf = (line) => (line.low ? [line.low, line.high] : []);

  /** Return one x axis for all series, and their columns: mean, low, high, next mean, ... */
  const aligned = (series) => uPlot.join(series.map((line) => [line.x, line.y, ...bandOf(line)]));

  /** Return about 3 to 8 round values on a log scale: powers of 10, or with some multiples, or equally spaced ones. */
  const logTicks = (low, high) => {
    const powers = [];
    for (let n = Math.floor(Math.log10(low)); n <= Math.log10(high); n++) powers.push(n);
    for (const factors of [[1], [1, 2, 5], [1, 1.5, 2, 3, 5, 7]]) {
      const found = powers.flatMap((n) => factors.map((factor) => Number(`${factor}e${n}`)));
      const inside = found.filter((value) => value >= low && value <= high);
      if (inside.length >= 3) return inside.filter((_, i) => i % Math.ceil(inside.length / 8) === 0);
    }
    const step = Number(((high - low) / 4).toPrecision(1));
    return [1, 2, 3, 4, 5].map((n) => Number(((Math.floor(low / step) + n) * step).toPrecision(6))).filter((v) => v <= high);
  };

  const axis = (side, isLog, label, format, colors) => ({
    ...(isLog ? { splits: (_, __, low, high) => logTicks(low, high), filter: (_, ticks) => ticks } : {}),
    label, labelSize: 28, stroke: colors.text, font: colors.font, labelFont: colors.font, ticks: { stroke: colors.grid },
    grid: { stroke: colors.grid, width: 1 },
    values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : format(tick))),
    size: side === "x" ? 36 : (_, values) => 16 + 7 * Math.max(3, ...(values ?? []).map((text) => (text ?? "").length)),
  });

  class Plot {
    constructor(place, spec) {
      this.hidden = new Set();
      this.log = { x: Boolean(spec.x?.log), y: Boolean(spec.y?.log) };
      this.area = element("div", { className: "plot-area", tabIndex: 0 });
      this.area.setAttribute("role", "group");
      this.caption = element("figcaption");
      this.legend = element("div", { className: "plot-legend" });
      this.position = element("output", { className: "plot-position" });
      this.tools = element("div", { className: "plot-tools" });
      this.table = element("details", { className: "plot-table" }, element("summary", {}, "Values as a table"));
      place.replaceChildren(
        element("figure", { className: "plot" }, this.caption, this.area, this.legend,
          element("div", { className: "plot-below" }, this.position, this.tools), this.table),
      );
      this.table.addEventListener("toggle", () => this.fillTable());
      this.area.addEventListener("keydown", (event) => this.move(event));
      new ResizeObserver(() => this.draw()).observe(this.area);
      document.addEventListener("themechange", () => this.draw(true));
      this.update(spec);
    }

    update(spec) {
      this.spec = spec;
      this.data = aligned(spec.series);
      this.canLog = { x: isPositive(spec.series.map((line) => line.x)),
                      y: isPositive(spec.series.flatMap((line) => [line.y, ...bandOf(line)])) };
      this.caption.textContent = spec.title;
      this.area.setAttribute("aria-label", `${spec.title}. Plot; the arrow keys move along the x axis.`);
      this.fillLegend();
      this.fillTools();
      this.fillTable();
      this.draw(true);
    }

    /** Show new values of the same series, without moving the focus or the cursor. */
    grow(series) {
      const hadPoints = this.spec.series.map(hasPoints);
      this.spec = { ...this.spec, series };
      this.data = aligned(series);
      this.fillTable();
      const isSame = series.every((line, i) => hasPoints(line) === hadPoints[i]);
      if (isSame && this.drawn) this.drawn.setData(this.data);
      else this.draw(true);
    }

    fillLegend() {
      this.values = [];
      this.swatches = [];
      const buttons = this.spec.series.map((line, i) => {
        const swatch = element("span", { className: `swatch series-${colorOf(line, i)} dash-${dashOf(line, i)}` });
        const value = element("span", { className: "value" });
        const button = element("button", { type: "button" }, swatch, line.name, " ", value);
        button.setAttribute("aria-pressed", String(!this.hidden.has(line.name)));
        button.addEventListener("click", () => this.toggle(line.name, button));
        this.values.push(value);
        this.swatches.push(swatch);
        return button;
      });
      this.legend.replaceChildren(...buttons);
    }

    toggle(name, button) {
      if (!this.hidden.delete(name)) this.hidden.add(name);
      button.setAttribute("aria-pressed", String(!this.hidden.has(name)));
      this.draw(true);
    }

    fillTools() {
      const buttons = ["x", "y"].filter((side) => this.canLog[side]).map((side) => {
        const button = element("button", { type: "button" }, `log ${side}`);
        button.setAttribute("aria-pressed", String(this.log[side]));
        button.addEventListener("click", () => {
          this.log[side] = !this.log[side];
          button.setAttribute("aria-pressed", String(this.log[side]));
          this.draw(true);
        });
        return button;
      });
      this.tools.replaceChildren(...buttons);
    }

    format(side) {
      return this.spec[side]?.format ?? number;
    }

    /** Draw, if there is room: a plot in a closed section has none, and is drawn when the section opens. */
    draw(again = false) {
      const width = Math.floor(this.area.clientWidth);
      if (width === 0 || (!again && this.drawn?.width === width)) return;
      this.drawn?.destroy();
      this.drawn = new uPlot(this.options(width), this.data, this.area);
    }

    options(width) {
      const style = getComputedStyle(this.area);
      const colors = { text: style.color, grid: style.borderTopColor, font: `12px ${style.fontFamily}` };
      const series = [{}];
      const bands = [];
      this.spec.series.forEach((line, i) => {
        const stroke = getComputedStyle(this.swatches[i]).color;
        const show = !this.hidden.has(line.name);
        const dash = DASHES[dashOf(line, i)].map((size) => size * devicePixelRatio); // uPlot scales widths, not dashes
        series.push({ stroke, width: 2, dash, show, points: { show: hasPoints(line), size: 5 } });
        if (!line.low) return;
        const edge = { stroke: "transparent", width: 0, show, points: { show: false } };
        series.push(edge, { ...edge });
        const fill = stroke.replace("rgb(", "rgba(").replace(")", `, ${BAND_OPACITY})`);
        bands.push({ series: [series.length - 1, series.length - 2], fill });
      });
      const isLog = { x: this.log.x && this.canLog.x, y: this.log.y && this.canLog.y };
      const margin = { x: 1, y: 1.1 }; // of a log scale, as a factor; without it uPlot extends to whole powers of 10
      const scale = (side) => (isLog[side]
        ? { distr: 3, range: (_, low, high) => [low / margin[side], high * (low === high ? 1.1 : margin[side])] }
        : { distr: 1 });
      const axes = ["x", "y"].map((side) => axis(side, isLog[side], this.spec[side]?.label, this.format(side), colors));
      return {
        width, height: this.spec.height ?? 280, series, bands,
        scales: { x: { time: false, ...scale("x") }, y: scale("y") },
        axes,
        legend: { show: false },
        cursor: { y: false, drag: { x: false, y: false }, dataIdx: (plot, column, at) => this.nearest(plot.data[column], at) },
        hooks: { setCursor: [(plot) => this.show(plot)], draw: [(plot) => this.drawMark(plot, colors)] },
      };
    }

    /** Return the index of the nearest value of a series: not every series has one at every x. A gap, and what is before
        the first value or after the last one, has none. */
    nearest(column, at) {
      let before = at, after = at;
      while (before >= 0 && column[before] === undefined) before--;
      while (after < column.length && column[after] === undefined) after++;
      if (before < 0 || after === column.length) return null;
      const index = at - before <= after - at ? before : after;
      return column[index] === null ? null : index;
    }

    /** Show the values at the cursor in the legend. */
    show(plot) {
      const at = plot.cursor.idx;
      this.position.textContent = at == null ? "" : `${this.spec.x?.label ?? "x"} ${this.format("x")(this.data[0][at])}`;
      let column = 1;
      this.spec.series.forEach((line, i) => {
        const index = at == null ? null : this.nearest(this.data[column], at);
        const read = (offset) => this.format("y")(this.data[column + offset][index]);
        const band = line.low && index !== null ? ` (${read(1)} to ${read(2)})` : "";
        this.values[i].textContent = index === null ? "" : read(0) + band;
        column += 1 + bandOf(line).length;
      });
    }

    move(event) {
      const last = this.data[0].length - 1;
      const at = this.drawn?.cursor.idx ?? -1;
      const next = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last }[event.key];
      if (next === undefined) return;
      event.preventDefault();
      const x = this.data[0][Math.min(Math.max(next, 0), last)];
      this.drawn.setCursor({ left: this.drawn.valToPos(x, "x"), top: 0 });
    }

    drawMark(plot, colors) {
      const mark = this.spec.x?.mark;
      if (mark === undefined || mark === null) return;
      const { ctx, bbox } = plot;
      const left = plot.valToPos(mark, "x", true);
      ctx.save();
      ctx.strokeStyle = colors.text;
      ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(left, bbox.top);
      ctx.lineTo(left, bbox.top + bbox.height);
      ctx.stroke();
      ctx.restore();
    }

    /** Fill the table when it is open: most readers never open it. */
    fillTable() {
      this.table.querySelector("table")?.remove();
      if (!this.table.open) return;
      const head = element("tr", {}, element("th", { scope: "col" }, this.spec.x?.label ?? "x"));
      for (const line of this.spec.series) {
        head.append(element("th", { scope: "col" }, line.name));
        if (line.low) head.append(element("th", { scope: "col" }, "lowest"), element("th", { scope: "col" }, "highest"));
      }
      const rows = this.data[0].map((x, row) => element("tr", {},
        element("td", { className: "number" }, this.format("x")(x)),
        ...this.data.slice(1).map((column) =>
          element("td", { className: "number" }, column[row] == null ? "" : this.format("y")(column[row])))));
      this.table.append(element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
    }
  }

  Subquad.plot = (place, spec) => new Plot(place, spec);
})();
