"""Style and script of the page; light and dark as the reader's system is."""

STYLE = """
:root{--bg:#f6f7f9;--card:#fff;--ink:#17202a;--muted:#66707d;--line:#dfe3e8;--ok:#12805c;
--bad:#c2313a;--note:#8a6100;--okbg:#dff3ea;--badbg:#fbe3e4;--notebg:#fbf0d2;--code:#f0f2f5;
--g0:#3b6fd4;--g1:#e08a1e;--g2:#2a9d76;--g3:#9a5fc9;--g4:#d4506f;--g5:#4aa3c7;--g6:#8d9a2b;
--g7:#7a6652}
@media (prefers-color-scheme:dark){:root{--bg:#12161b;--card:#1b2128;--ink:#e7ebf0;--muted:#98a3b0;
--line:#303944;--ok:#4fd0a2;--bad:#ff7a80;--note:#f0c04f;--okbg:#123a2e;--badbg:#45201f;
--notebg:#3c3113;--code:#232a33}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1080px;margin:0 auto;padding:32px 20px 64px}
h1{font-size:30px;margin:0 0 4px;display:flex;gap:14px;align-items:center;flex-wrap:wrap}
h2{font-size:18px;margin:0 0 12px} section>h2{margin-top:28px} .card>h2{margin-top:0}
h3{font-size:15px;font-weight:600;margin:6px 0;overflow-wrap:anywhere}
.legend{font-size:12px}
.kicker{margin:0;color:var(--muted);letter-spacing:.06em;text-transform:uppercase;font-size:12px}
.muted{color:var(--muted);margin:0 0 10px} .where{font-size:13px;overflow-wrap:anywhere}
header{margin:36px 0 18px} header:first-child{margin-top:0}
.verdict{font-size:15px;padding:4px 12px;border-radius:999px;font-weight:600}
.verdict.ok{background:var(--okbg);color:var(--ok)}
.verdict.bad{background:var(--badbg);color:var(--bad)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:12px;margin-top:14px}
.tile{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:12px 16px}
.tile b{display:block;font-size:26px;line-height:1.2}.tile span{color:var(--muted);font-size:13px}
.card{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:18px 20px;
margin:0 0 14px} article.finding{border-left:4px solid var(--bad)}
article.known{border-left:4px solid var(--line)}
.facts{display:flex;flex-wrap:wrap;gap:6px 26px;margin:0 0 12px}
.facts dt{color:var(--muted);font-size:12px}.facts dd{margin:0;font-weight:600}
.scroll{overflow-x:auto} svg{display:block;font:12px system-ui,sans-serif;max-width:none}
svg .lane{stroke:var(--line)} svg .cut{stroke:var(--bad);stroke-width:2;stroke-dasharray:4 3}
svg .name{fill:var(--ink);font-weight:600} svg .name tspan{fill:var(--muted);font-weight:400}
svg .batch{fill:var(--muted);font-size:11px}
svg .ring{fill:none;stroke:var(--muted);stroke-width:2} svg .ring.bad{stroke:var(--bad)}
svg .none{fill:none}
.g0{fill:var(--g0)}.g1{fill:var(--g1)}.g2{fill:var(--g2)}.g3{fill:var(--g3)}.g4{fill:var(--g4)}
.g5{fill:var(--g5)}.g6{fill:var(--g6)}.g7{fill:var(--g7)}
table{border-collapse:collapse;width:100%;font-size:13px;margin-top:8px}
th{text-align:left;color:var(--muted);font-weight:500}
td,th{padding:7px 12px 7px 0;border-top:1px solid var(--line);vertical-align:top}
code,pre{font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
code{background:var(--code);padding:1px 5px;border-radius:5px;overflow-wrap:anywhere}
pre{background:var(--code);border-radius:8px;padding:10px 0;overflow-x:auto;margin:8px 0}
pre span{display:block;padding:0 12px;white-space:pre}
pre .hit{background:var(--badbg);box-shadow:inset 3px 0 var(--bad)}
pre i{display:inline-block;min-width:3.2em;color:var(--muted);font-style:normal;user-select:none}
.tag{display:inline-block;font-size:12px;padding:1px 9px;border-radius:999px;
background:var(--code);
margin-right:6px;white-space:nowrap}.tag.finding,.tag.bad{background:var(--badbg);color:var(--bad)}
.tag.note{background:var(--notebg);color:var(--note)}
.count{color:var(--muted);font-weight:400}.mend{margin:8px 0 0;font-size:14px}
article p:first-child{margin:0}.notes{margin:0;padding-left:18px;font-size:13px;color:var(--muted)}
summary{cursor:pointer;color:var(--muted);margin-top:12px}
.bar{position:relative;display:flex;gap:12px;align-items:center;padding:3px 8px;margin:3px 0}
.bar>span{position:absolute;inset:0 auto 0 0;background:var(--g0);opacity:.16;border-radius:5px}
.bar code{background:none;flex:1;position:relative}.bar small{color:var(--muted);position:relative}
"""

# A location is copied by a click, for an editor to open.
SCRIPT = (
    "document.querySelectorAll('.where').forEach(e=>{e.title='click to copy';"
    "e.style.cursor='copy';e.onclick=()=>navigator.clipboard&&"
    "navigator.clipboard.writeText(e.textContent.split(' in ')[0])});"
)
