"use strict";
Subquad.parts.claims = () => {};
