"use strict";
/* The one global name of the page, and what all its parts share.

   Subquad.parts.NAME = (root, data) => {...}    registered by each part, called by boot.js
   Subquad.element("p", {className: "note"}, "text", child, ...)
   Subquad.number(0.012345)                      "0.01235"
   "themechange" on document                     after a change between light and dark */

const Subquad = { parts: {} };

/** Create an element. Text is always text, never HTML. */
Subquad.element = (name, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
};

/** Format a number with four significant digits, and with commas. */
Subquad.number = (value) => {
  if (value === null || value === undefined) return "";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("e+", "e");
  return value.toLocaleString("en-US", { maximumSignificantDigits: 4 });
};

/** Return whether the page is dark now. */
Subquad.isDark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};
