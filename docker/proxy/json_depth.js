// Passes JSON on to the server unless it is nested deeper than any request needs: tritonserver 24.10 parses by recursion,
// and 50,000 brackets in 100 kB end it.

const MAX_DEPTH = 16;

const STRING = '"(?>[^"\\\\]++|\\\\[\\s\\S])*+"';
const OTHER = '[^"\\[\\]{}]++';

// Text whose brackets are nested no deeper than `depth`; brackets in strings are text. Nothing is matched twice.
function nested(depth) {
    const within = depth > 0 ? `|[\\[{]${nested(depth - 1)}[\\]}]` : '';
    return `(?>${OTHER}|${STRING}${within})*+`;
}

const SHALLOW = new RegExp(`^${nested(MAX_DEPTH)}$`);

function isShallow(text) {
    try {
        return SHALLOW.test(text);
    } catch (limit) { // of PCRE's steps: millions of brackets
        return false;
    }
}

function pass(request) {
    if (isShallow(request.requestText)) { // raises, which is a status 500, where the body is not in memory
        request.internalRedirect(request.variables.checked);
    } else {
        request.return(400, `{"error":"the body is not JSON of at most ${MAX_DEPTH} levels"}`);
    }
}

export default { pass };
