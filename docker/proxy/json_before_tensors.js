// Looks at the JSON before the tensors of an HTTP inference, at the beginning of a connection of its own between two parts
// of the proxy, and leaves all that follows unread.

import json from 'json_check.js';

const END_OF_HEAD = '\r\n\r\n';

let isRefused = true;

function look(session) {
    session.on('upstream', (received, flags) => { // all that has been received, each time
        const end = received.indexOf(END_OF_HEAD);
        if (end < 0) {
            return;
        }
        const length = /\r\ninference-header-content-length: *([0-9]+)\r/i.exec(received.toString('utf8', 0, end + 2));
        const start = end + END_OF_HEAD.length;
        if (length && received.length < start + Number(length[1]) && !flags.last) {
            return;
        }
        isRefused = !length || json.refusal(received.toString('utf8', start, start + Number(length[1]))) !== '';
        session.off('upstream');
        session.done();
    });
}

function destination(session) {
    return isRefused ? '127.0.0.1:8094' : '127.0.0.1:8000';
}

export default { look, destination };
