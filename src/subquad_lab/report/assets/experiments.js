"use strict";
/* The plots of all experiments; the elements name them. */

Subquad.parts.experiments = (root, data) => {
  for (const place of root.querySelectorAll("[data-plot]")) Subquad.plot(place, data[place.dataset.plot]);
};
