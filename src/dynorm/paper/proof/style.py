"""The style of the page."""

STYLE = """
:root { --ink: #1c2024; --soft: #5b646d; --line: #d9dee3; --back: #ffffff; --panel: #f5f7f9; --good: #1a7f43;
  --bad: #b42318; --link: #0b5cad; --claim: #eef4fb; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7ea; --soft: #9aa4ad; --line: #343b42; --back: #14181b; --panel: #1c2125; --good: #4cc27c;
    --bad: #ff8d80; --link: #79b8ff; --claim: #1a2634; }
}
* { box-sizing: border-box; }
html { scroll-behavior: smooth; }
@media (prefers-reduced-motion: reduce) { html { scroll-behavior: auto; } }
body { margin: 0; background: var(--back); color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: .5rem 0; }
h2 { font-size: 1.3rem; line-height: 1.3; margin: 0 0 .2rem; }
p { margin: .5rem 0; }
a { color: var(--link); }
math { font-size: 1.08em;
  font-family: "Latin Modern Math", "STIX Two Math", "Cambria Math", "DejaVu Math TeX Gyre", math; }
.claim math, .definitions math { math-style: normal; }
.lead { font-size: 1.1rem; color: var(--good); font-weight: 600; }
code { font-size: .95em; background: var(--panel); border: 1px solid var(--line); border-radius: 4px;
  padding: 0 .3rem; margin-right: .4rem; }
.note, .reason, .remarks, .up { color: var(--soft); font-size: .9rem; }
.bad, .lead.bad { color: var(--bad); }
.mark { color: var(--good); font-weight: 700; }
.mark.bad { color: var(--bad); }
nav { margin: 2rem 0; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; margin-top: .6rem; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { padding: .35rem .7rem; text-align: left; border-top: 1px solid var(--line); vertical-align: top; }
thead th { border-top: 0; background: var(--panel); white-space: nowrap; }
tbody th { font-weight: 400; min-width: 13rem; }
td:nth-child(n + 3) { white-space: nowrap; }
td:nth-child(n + 4) { text-align: right; font-variant-numeric: tabular-nums; }
section { border-top: 1px solid var(--line); padding: 1.6rem 0 .4rem; scroll-margin-top: .5rem; }
.claim { background: var(--claim); border-radius: 8px; padding: .8rem 1rem; font-size: 1.08rem; overflow-x: auto; }
.definitions { list-style: none; display: flex; flex-wrap: wrap; gap: .3rem 1.8rem; margin: .8rem 0; padding: 0; }
.definitions li, .remarks li { max-width: 100%; overflow-x: auto; overflow-y: hidden; padding: .1rem 0; }
.steps { list-style: none; margin: 1rem 0; padding: 0; }
.steps li { display: grid; grid-template-columns: 1.4rem minmax(0, 1fr) 2.6rem minmax(0, 20rem); gap: 0 .6rem;
  align-items: center; padding: .35rem .5rem; border-top: 1px solid var(--line); }
.steps li.follows, .misprint li.meant { border-top-color: transparent; }
.steps li.follows .formula { padding-left: 2rem; }
.formula { overflow-x: auto; overflow-y: hidden; padding: .25rem 0; grid-column: 2; }
.formula math { display: inline-block; width: max-content; }
.tag { grid-column: 3; color: var(--soft); text-align: right; }
.reason { grid-column: 4; margin: 0; }
.steps li > .bad:last-child:not(.mark) { grid-column: 2 / -1; font-size: .9rem; overflow-wrap: anywhere; }
.misprint h2::after { content: "misprint"; font-size: .75rem; font-weight: 600; color: var(--bad); margin-left: .6rem;
  border: 1px solid; border-radius: 99px; padding: .1rem .5rem; vertical-align: middle; }
.up { text-align: right; }
@media (max-width: 46rem) {
  .steps li { grid-template-columns: 1.4rem minmax(0, 1fr) auto; }
  .reason { grid-column: 2 / -1; }
  .steps li.follows .formula { padding-left: .8rem; }
  h1 { font-size: 1.5rem; }
  nav th:nth-child(2), nav td:nth-child(2) { display: none; }
  tbody th { min-width: 8rem; }
  th, td { padding: .35rem .4rem; }
}
@media print { nav, .up { display: none; } .steps li { break-inside: avoid; } }
"""
