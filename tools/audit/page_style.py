"""The style sheet of the audit's page: light and dark, wide and narrow."""

from __future__ import annotations

STYLE = """
:root{--bg:#f6f6f4;--card:#fff;--text:#1c1f23;--soft:#5d646d;--line:#e2e2de;--blue:#2f6fb5;--green:#3b8e5d;
--amber:#c8862a;--grey:#a4a9b0;--red:#b93a32;--bad:#fbeae8;--so:#fcf3e2;--good:#e8f4ec}
@media(prefers-color-scheme:dark){:root{--bg:#15171a;--card:#1e2125;--text:#e6e7e9;--soft:#a0a7b0;--line:#33373d;
--blue:#5b9be0;--green:#5bb583;--amber:#dda350;--grey:#6d747d;--red:#e4756c;--bad:#3a2322;--so:#382e1c;--good:#1d3226}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--text);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
-webkit-text-size-adjust:100%}
main{max-width:60rem;margin:0 auto;padding:1rem}
h1{font-size:1.6rem;line-height:1.25;margin:.5rem 0 0;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:0 0 .3rem}
p{margin:.3rem 0 .7rem}
.soft{color:var(--soft);font-size:.92rem}
section{background:var(--card);border:1px solid var(--line);border-radius:.6rem;padding:1rem 1.1rem;margin:1rem 0}
section>p:first-of-type{max-width:46rem}
.verdict{font-size:1.1rem;font-weight:600;border-radius:.6rem;padding:.8rem 1.1rem;margin:1rem 0;
border-left:.4rem solid}
.verdict.good{background:var(--good);border-color:var(--green)}
.verdict.so-so{background:var(--so);border-color:var(--amber)}
.verdict.bad{background:var(--bad);border-color:var(--red)}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(8.5rem,1fr));gap:.8rem 1rem}
.tiles b{display:block;font-size:1.45rem;line-height:1.2;font-variant-numeric:tabular-nums}
.tiles span{color:var(--soft);font-size:.88rem;line-height:1.3;display:block}
.finding{border-left:.25rem solid;padding:.1rem 0 .1rem .8rem;margin:.9rem 0}
.finding.bad{border-color:var(--red)}
.finding.so-so{border-color:var(--amber)}
.finding p{margin:.15rem 0;overflow-wrap:anywhere}
.finding .address{margin-top:.6rem}
.address,td:first-child{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:.85rem}
code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:.9em}
ul{margin:.4rem 0;padding-left:1.2rem}
.chart{margin:.8rem 0 0}
.chart .top,.chart .axis{display:flex;justify-content:space-between;gap:1rem;color:var(--soft);font-size:.82rem}
.chart svg{display:block;width:100%;height:11rem;border-bottom:1px solid var(--soft);border-top:1px dashed var(--line)}
.chart .axis{min-width:15rem}
.chart .axis span:last-child{text-align:right}
.chart .axis span:nth-child(2):not(:last-child){text-align:center}
.legend{display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;margin-top:.5rem;font-size:.88rem}
.legend i{display:inline-block;width:.8em;height:.8em;border-radius:.15em;margin-right:.4em}
.c-blue{fill:var(--blue);background:var(--blue)}
.c-green{fill:var(--green);background:var(--green)}
.c-amber{fill:var(--amber);background:var(--amber)}
.c-grey{fill:var(--grey);background:var(--grey)}
.bars{display:grid;gap:.35rem;margin:.6rem 0}
.bar{display:grid;grid-template-columns:minmax(7rem,14rem) 1fr minmax(7.5rem,auto);gap:.7rem;align-items:center;
font-size:.92rem}
.bar .name{overflow-wrap:anywhere;line-height:1.25}
.bar .value{font-variant-numeric:tabular-nums;white-space:nowrap}
.track{display:block;height:1rem;background:var(--bg);border-radius:.2rem;overflow:hidden}
.track i{display:block;height:100%;border-radius:.2rem}
.wide{overflow-x:auto;margin-top:.8rem}
table{border-collapse:collapse;font-size:.88rem;width:100%}
th,td{text-align:left;padding:.3rem .8rem .3rem 0;border-bottom:1px solid var(--line);vertical-align:top;
white-space:nowrap}
th{color:var(--soft);font-weight:600}
td:last-child:not(.number){white-space:normal;min-width:14rem}
summary{cursor:pointer;color:var(--blue);margin:.4rem 0}
.number{text-align:right;font-variant-numeric:tabular-nums}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.3rem 1rem;margin:.4rem 0}
dt{font-weight:600}
dd{margin:0}
@media(max-width:34rem){
main{padding:.6rem}
section{padding:.8rem}
.bar{grid-template-columns:1fr auto;gap:.1rem .7rem;margin-bottom:.3rem}
.bar .track{grid-column:1/-1;grid-row:2;height:.8rem}
.chart svg{height:9rem}
dl{grid-template-columns:1fr;gap:0}
dd{margin-bottom:.5rem}
}
"""
