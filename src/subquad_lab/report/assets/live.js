"use strict";
/* Unfinished runs: a row with progress and growing curves for each, by server-sent events.

   data.states has the runs that the page already shows, by their places. A message holds all that is known about one
   run, so a row is simply brought up to date: after a lost connection, the newest messages are enough. */

(() => {
  const { element, number } = Subquad;
  const MAX_FIGURES = 8;
  const IDLE = "There are no unfinished runs.";
  const whole = (count) => count.toLocaleString("en-US");

  class Row {
    constructor(list, name) {
      this.text = element("p");
      this.bar = element("progress");
      this.bar.setAttribute("aria-label", `Progress of ${name}`);
      this.damage = element("p", { className: "live-damage" });
      this.places = element("div", { className: "live-plots" });
      this.plots = {};
      this.element = element("article", {}, element("h3", {}, name), this.bar, this.text, this.damage, this.places);
      list.append(this.element);
    }

    update(message) {
      const { state, step, total, figures, damage } = message;
      this.bar.hidden = state !== "unfinished" || !total;
      if (total) Object.assign(this.bar, { max: total, value: Math.min(step, total) });
      const steps = step === undefined ? "" : `step ${whole(step)}${total ? ` of ${whole(total)}` : ""}`;
      const latest = Object.entries(figures ?? {}).slice(0, MAX_FIGURES).map(([name, value]) => `${name} ${number(value)}`);
      this.text.textContent = [state, steps, ...latest].filter(Boolean).join(", ");
      if (state === "finished") this.text.append(". To see its result, reload the page in half a minute.");
      this.damage.textContent = damage ?? "";
      this.draw("training loss", message.loss);
      this.draw(message.measure?.replace("valid/", "validation ").replaceAll("_", " "), message.valid);
    }

    /** Draw a curve, or let it grow; there is nothing to draw before its first point. */
    draw(name, curve) {
      if (!curve?.[0].length) return;
      const series = [{ name, x: curve[0], y: curve[1] }];
      if (this.plots[name]) {
        this.plots[name].grow(series);
        return;
      }
      const place = this.places.appendChild(element("div"));
      this.plots[name] = Subquad.plot(place, { title: name, x: { label: "step" }, y: { label: name }, series });
    }
  }

  Subquad.parts.live = (root, data) => {
    const status = root.querySelector(".live-status");
    const list = root.querySelector(".live-runs");
    const rows = new Map();
    const say = (text) => {
      if (status.textContent !== text) status.textContent = text;
    };

    const receive = (message) => {
      const isOld = !rows.has(message.run) && message.state !== "unfinished" && data.states[message.run] === message.state;
      if (message.state === "removed") {
        rows.get(message.run)?.element.remove();
        rows.delete(message.run);
      } else if (!isOld) {
        if (!rows.has(message.run)) rows.set(message.run, new Row(list, message.name));
        rows.get(message.run).update(message);
      }
      say(rows.size ? "Unfinished runs, and those that have changed since the page was opened:" : IDLE);
    };

    say("Connecting ...");
    const source = new EventSource("events");
    source.addEventListener("open", () => say(IDLE));
    source.addEventListener("error", () => say("The server cannot be reached; trying again ..."));
    source.addEventListener("message", (event) => receive(JSON.parse(event.data)));
  };
})();
