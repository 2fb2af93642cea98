"use strict";
/* Cards that ask before they show. Without this script, everything is visible. */

Subquad.parts.claims = (root, claims) => {
  const { element } = Subquad;
  const reveals = [];

  /** Return the answers to choose from, the true one marked; the order follows from the number of the claim. */
  const options = (claim) => {
    const answers = claim.mistake
      ? [{ text: claim.statement, isTrue: claim.holds }, { text: claim.mistake, isTrue: false }]
      : [{ text: "It holds.", isTrue: claim.holds }, { text: "It does not hold.", isTrue: !claim.holds }];
    return claim.number % 2 ? answers : answers.reverse();
  };

  const outcome = (claim, answer) => {
    if (answer.isTrue) return "That is what was measured.";
    return claim.mistake && claim.holds ? "That is the common mistake; the measurement rejects it."
      : "The measurement says otherwise.";
  };

  for (const claim of claims) {
    const card = root.querySelector(`[data-claim="${claim.number}"]`);
    const [statement, evidence] = [".statement", ".evidence"].map((name) => card.querySelector(name));
    const question = claim.mistake ? "Predict first: which of these holds?" : "Predict first: does it hold?";
    const said = element("p", { className: "outcome" });
    said.setAttribute("role", "status");
    const asked = element("div", { className: "predict" }, element("p", {}, question));
    asked.setAttribute("role", "group");
    asked.setAttribute("aria-label", `Claim ${claim.number}. ${question}`);

    const reveal = () => {
      statement.hidden = evidence.hidden = false;
      card.classList.add("answered"); // which hides the other options; the chosen one keeps the focus
    };
    for (const answer of options(claim)) {
      const button = element("button", { type: "button" }, answer.text);
      button.addEventListener("click", () => {
        if (card.classList.contains("answered")) return;
        reveal();
        button.setAttribute("aria-pressed", "true");
        button.classList.add("chosen", answer.isTrue ? "right" : "wrong");
        said.textContent = outcome(claim, answer);
      });
      asked.append(button);
    }
    evidence.hidden = true;
    statement.hidden = Boolean(claim.mistake);
    evidence.before(asked, said);
    reveals.push(reveal);
  }

  const all = root.querySelector(".reveal");
  all.hidden = false;
  all.addEventListener("click", () => reveals.forEach((reveal) => reveal()));
};
