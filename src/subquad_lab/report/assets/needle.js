"use strict";
/* The needle: move it through the text, and see which methods still find it. All answers were measured before. */

(() => {
  const { element } = Subquad;
  const { group, radio, scrolled, slider } = Subquad.controls;
  const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
  const count = (number) => number.toLocaleString("en-US");

  class Needle {
    constructor(root, data) {
      this.data = data;
      this.at = { length: 1, place: 4 };
      this.place = root.querySelector("[data-place=needle]");
      this.build();
      this.place.hidden = false;
      this.draw(); // which scrolls the text to the needle
    }

    length() {
      return this.data.lengths[this.at.length];
    }

    build() {
      this.text = element("div", { className: "needle-text", tabIndex: 0 });
      this.text.setAttribute("role", "region");
      this.text.setAttribute("aria-label", "The text with the needle");
      this.summary = element("p", { className: "needle-summary" });
      this.summary.setAttribute("role", "status");
      this.answers = element("tbody");
      this.grid = element("table", { className: "needle-grid" });
      this.place.replaceChildren(
        element("div", { className: "needle-controls" }, this.buildLengths(), this.buildPlace()),
        this.summary,
        scrolled("Answers of the model with each method", element("table", {},
          element("caption", {}, "Answers with the needle at this place"),
          element("thead", {}, element("tr", {}, ...["method", "needle", "answer", "weight on the needle"].map((text, i) =>
            element("th", { scope: "col", className: i === 3 ? "number" : "" }, text)))), this.answers)),
        this.text,
        scrolled("Places at which each method finds the needle", this.grid),
      );
    }

    buildLengths() {
      const choices = this.data.lengths.map((length, i) => radio("needle-length", `${count(length.tokens)} tokens`, i === this.at.length, () => {
        this.at.length = i;
        this.draw();
      }));
      return group("Length of the text", element("div", { className: "needle-lengths" }, ...choices));
    }

    buildPlace() {
      const range = { min: 0, max: this.length().places.length - 1, value: this.at.place };
      this.depth = slider("depth", range, (place) => {
        this.at.place = place;
        this.draw();
      });
      this.where = element("p", { className: "note" });
      return group("Place of the needle", this.depth.line, this.where);
    }

    draw() {
      const length = this.length(), place = length.places[this.at.place];
      this.depth.show(`${Math.round(100 * place.depth)} %`);
      this.where.textContent = `about ${count(length.tokens - place.token)} tokens before the end`;
      this.drawText(length, place);
      this.drawAnswers(place);
      this.drawGrid(length);
      const found = this.data.methods.filter((_, i) => place.methods[i].is_found);
      const lost = this.data.methods.filter((_, i) => !place.methods[i].is_found);
      const list = new Intl.ListFormat("en");
      this.summary.textContent = `${list.format(found) || "No method"} ${found.length > 1 ? "find" : "finds"} the needle here`
        + `${lost.length ? `; ${list.format(lost)} ${lost.length > 1 ? "lose" : "loses"} it.` : "."}`;
    }

    drawText(length, place) {
      const sentences = this.data.sentences.slice(0, length.sentences);
      const needle = element("mark", {}, this.data.needle);
      this.text.replaceChildren(sentences.slice(0, place.sentence).join("").trimStart(), " ", needle,
        sentences.slice(place.sentence).join(""), " ", element("strong", {}, this.data.question));
      this.text.scrollTop = needle.offsetTop - this.text.clientHeight / 2;
    }

    drawAnswers(place) {
      this.answers.replaceChildren(...place.methods.map((row, i) => element("tr", {},
        element("th", { scope: "row" }, this.data.methods[i]),
        element("td", { className: row.is_found ? "found" : "lost" }, row.is_found ? "✓ found" : "✗ lost"),
        element("td", {}, element("code", {}, row.answer.trim().replace(/\s+/g, " ") || "nothing")),
        element("td", { className: "number" }, percent(row.weight)))));
    }

    drawGrid(length) {
      const mark = (i) => (i === this.at.place ? " chosen" : "");
      const depths = length.places.map((place, i) =>
        element("th", { scope: "col", className: `number${mark(i)}` }, `${Math.round(100 * place.depth)} %`));
      const rows = this.data.methods.map((method, number) => element("tr", {}, element("th", { scope: "row" }, method),
        ...length.places.map((place, i) => {
          const isFound = place.methods[number].is_found;
          const cell = element("td", { className: `${isFound ? "found" : "lost"}${mark(i)}` }, isFound ? "✓" : "✗");
          cell.setAttribute("aria-label", isFound ? "found" : "lost");
          return cell;
        })));
      this.grid.replaceChildren(element("caption", {}, `All places in ${count(length.tokens)} tokens`),
        element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "method"), ...depths)), element("tbody", {}, ...rows));
    }
  }

  Subquad.parts.needle = (root, data) => new Needle(root, data);
})();
